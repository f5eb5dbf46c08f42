"""Take the pictures of the report page for the docs: python benchmarks/screenshots.py RUN…

It needs chromium and playwright. The last ones are of pFedLA held-out and Local on CIFAR-10, four classes a client.
"""

import io
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from pfedla.report.page import write_page

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
SHOTS: dict[str, tuple[Any, int, int, str]] = {
    "light": ("light", 1100, 1, "#alpha"),
    "dark": ("dark", 1100, 1, "#clients"),
    "phone": ("light", 375, 2, "#alpha"),
}


def main() -> None:
    with tempfile.TemporaryDirectory() as place, sync_playwright() as driver:
        path = write_page([Path(run) for run in sys.argv[1:]], Path(place) / "report.html")
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (scheme, width, pixels, section) in SHOTS.items():
            size: Any = {"width": width, "height": 800}
            view = browser.new_context(viewport=size, color_scheme=scheme, device_scale_factor=pixels)
            page = view.new_page()
            page.goto(path.as_uri())
            page.wait_for_selector("section svg")
            picture = Image.open(io.BytesIO(page.locator(section).screenshot()))
            picture.quantize(128).save(PICTURES / f"report-{name}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main()
