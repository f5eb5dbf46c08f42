// Elements, charts and heat maps; nothing here knows what a run is.

const SVG = "http://www.w3.org/2000/svg";
const tip = document.getElementById("tip");

/** An element with attributes and children; text is never read as HTML. */
function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") node.style.cssText = value;
    else if (value !== false && value !== null) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function shape(parent, name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

const largest = (values, least = -Infinity) => values.reduce((most, value) => Math.max(most, value), least); // Math.max takes only so many
const smallest = (values) => values.reduce((least, value) => Math.min(least, value), Infinity);
const colour = (position) => `var(--c${position % 8})`;
const dashes = (position) => ["", "6 3", "2 3"][Math.floor(position / 8) % 3]; // tells series of one colour apart
const percent = (share, digits = 1) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(digits)} %`);
const plain = (value) => (Math.abs(value) >= 100 ? String(+value.toPrecision(4)) : value.toFixed(3));
/** A score as its metric is shown: 91.3 %, 0.913, 1234; a dash where it is undefined. */
const score = (value, metric, digits = 1) => (metric.percent || value === null || value === undefined ? percent(value, digits) : plain(value));
const scoreText = (metric) => (value, exact) => (exact ? score(value, metric, 2) : metric.percent ? percent(value, 0) : String(+value.toPrecision(3)));
const weight = (value) => value.toFixed(4);
const mebibytes = (value) => (value >= 100 ? value.toFixed(0) : value.toFixed(2));

function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 4))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18}px`;
}
const hideTip = () => { tip.hidden = true; };

function table(headings, rows, caption) {
  const head = el("tr", {}, ...headings.map((heading) => el("th", { scope: "col" }, heading)));
  const body = rows.map((cells) => el("tr", {}, ...cells.map((cell) => (cell instanceof Node ? cell : el("td", {}, String(cell))))));
  const parts = [el("thead", {}, head), el("tbody", {}, ...body)];
  if (caption) parts.unshift(el("caption", {}, caption));
  return el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": caption || headings.join(", ") }, el("table", {}, ...parts));
}

function legend(series) {
  return el("ul", { class: "legend" }, ...series.map((one) => el("li", {}, el("i", { style: `--key:${one.colour}` }), one.name)));
}

/** Round numbers that divide the range; whole ones if asked for. */
function ticks(low, high, count, whole = false) {
  const span = high - low || 1;
  const power = 10 ** Math.floor(Math.log10(span / count));
  let step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => span / candidate <= count);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step) found.push(value);
  return found;
}

/**
 * Lines or dots over a common x. series: {name, colour, points: [[x, y]], band: [[x, low, high]]}; y null is left out.
 * options: label, xLabel, yLabel, yText, xText, dots, whole (x), yRange, zero (a line at y = 0)
 */
function chart(series, options) {
  const holder = el("div", { class: "chart" });
  const draw = () => {
    const width = Math.max(280, holder.clientWidth || 640), height = Math.min(320, Math.max(220, width * 0.45));
    const upright = !options.names?.some((name) => name.length > 3);
    const margin = { left: 52, right: 12, top: 10, bottom: upright ? 40 : 64 };
    const points = series.flatMap((one) => one.points).filter((point) => point[1] !== null);
    const bands = series.flatMap((one) => one.band || []);
    if (!points.length) return holder.replaceChildren(el("p", { class: "note" }, "Nothing to draw yet."));
    const xs = points.map((point) => point[0]), ys = [...points.map((point) => point[1]), ...bands.flatMap((b) => [b[1], b[2]])];
    const [x0, x1] = [smallest(xs), largest(xs)];
    let [y0, y1] = options.yRange || [smallest(ys), largest(ys)];
    if (options.zero) [y0, y1] = [Math.min(y0, 0), Math.max(y1, 0)];
    const room = options.yRange ? 0 : (y1 - y0 || 0.02) * 0.06;
    [y0, y1] = [y0 - room, y1 + room];
    const pad = options.dots ? 0.6 : 0;
    const px = (x) => margin.left + ((x - x0 + pad) / (x1 - x0 + 2 * pad || 1)) * (width - margin.left - margin.right);
    const py = (y) => height - margin.bottom - ((y - y0) / (y1 - y0 || 1)) * (height - margin.top - margin.bottom);
    const svg = document.createElementNS(SVG, "svg");
    for (const [key, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": options.label }))
      svg.setAttribute(key, value);
    for (const value of ticks(y0, y1, 5)) {
      shape(svg, "line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: py(value), y2: py(value) });
      shape(svg, "text", { x: margin.left - 8, y: py(value) + 4, "text-anchor": "end" }, options.yText(value));
    }
    if (options.names) {
      options.names.forEach((name, x) => shape(svg, "text", {
        transform: `translate(${px(x) + (upright ? 0 : 4)},${height - margin.bottom + (upright ? 18 : 14)}) rotate(${upright ? 0 : -45})`, "text-anchor": upright ? "middle" : "end",
      }, name.length > 9 ? `${name.slice(0, 8)}…` : name));
    } else {
      for (const value of ticks(x0, x1, width / 90, options.whole))
        shape(svg, "text", { x: px(value), y: height - margin.bottom + 18, "text-anchor": "middle" }, +value.toFixed(6));
    }
    shape(svg, "text", { x: (margin.left + width) / 2, y: height - 4, "text-anchor": "middle" }, options.xLabel);
    if (options.zero) shape(svg, "line", { x1: margin.left, x2: width - margin.right, y1: py(0), y2: py(0), stroke: "var(--soft)" });
    series.forEach((one, position) => {
      const known = one.points.filter((point) => point[1] !== null);
      if (one.band?.length) {
        const edge = [...one.band.map((b) => [b[0], b[2]]), ...one.band.map((b) => [b[0], b[1]]).reverse()];
        shape(svg, "polygon", { points: edge.map(([x, y]) => `${px(x)},${py(y)}`).join(" "), fill: one.colour, opacity: 0.12 });
      }
      if (!options.dots)
        shape(svg, "polyline", { points: known.map(([x, y]) => `${px(x)},${py(y)}`).join(" "), fill: "none", stroke: one.colour,
          "stroke-width": 2, "stroke-dasharray": one.dash ?? dashes(position), "stroke-linejoin": "round" });
      if (options.dots || known.length < 15)
        for (const [x, y] of known)
          shape(svg, "circle", { cx: px(x), cy: py(y), r: options.dots ? 4.5 : 2.5, fill: one.colour, opacity: 0.85 });
    });
    const cross = shape(svg, "line", { class: "cross", y1: margin.top, y2: height - margin.bottom, visibility: "hidden" });
    const places = [...new Set(xs)].sort((a, b) => a - b);
    let at = -1;
    const point = (position, clientY) => {
      at = Math.max(0, Math.min(places.length - 1, position));
      const x = places[at], box = svg.getBoundingClientRect();
      for (const key of ["x1", "x2"]) cross.setAttribute(key, px(x));
      cross.setAttribute("visibility", "visible");
      const lines = series.flatMap((one) => one.points.filter((p) => p[0] === x && p[1] !== null).map((p) => `${one.name}: ${options.yText(p[1], true)}`));
      showTip([options.xText(x), ...lines].join("\n"), box.left + (px(x) / width) * box.width, clientY ?? box.top + 20);
    };
    const leave = () => { cross.setAttribute("visibility", "hidden"); hideTip(); };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * width;
      point(places.reduce((best, place, p) => (Math.abs(px(place) - x) < Math.abs(px(places[best]) - x) ? p : best), 0), event.clientY);
    });
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("blur", leave);
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step) { event.preventDefault(); point(at < 0 ? 0 : at + step); }
    });
    holder.replaceChildren(svg);
  };
  onWidth(holder, draw);
  return series.length > 1 || options.legend ? el("div", {}, legend(series), holder) : holder;
}

const watched = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    if (Math.abs((target.drawnAt ?? -9) - contentRect.width) < 1) continue;
    target.drawnAt = contentRect.width;
    target.draw();
  }
});
function onWidth(node, draw) { node.draw = draw; watched.observe(node); }

const STOPS = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37]];
/** From 0 to 1; the square root lets small values be seen. */
function heat(share) {
  const place = Math.sqrt(Math.max(0, Math.min(1, share))) * (STOPS.length - 1), low = Math.min(Math.floor(place), STOPS.length - 2);
  return STOPS[low].map((value, part) => Math.round(value + (place - low) * (STOPS[low + 1][part] - value)));
}

/** Fill a canvas, one pixel a cell; the style sheet makes it larger. */
function paint(canvas, rows, columns, value) {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d"), picture = context.createImageData(columns, rows);
  for (let row = 0; row < rows; row++)
    for (let column = 0; column < columns; column++)
      picture.data.set([...heat(value(row, column)), 255], 4 * (row * columns + column));
  context.putImageData(picture, 0, 0);
}

function scale(lowest, highest) {
  const bar = el("canvas", { "aria-hidden": "true" });
  paint(bar, 1, 120, (_, column) => column / 119);
  return el("div", { class: "scale" }, el("span", {}, lowest), bar, el("span", {}, highest));
}

/** A heat map that tells the cell under the pointer, or under the arrow keys: point(row, column, x, y); leave() */
function heatMap(rows, columns, value, { label, point, leave, height = null }) {
  const canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": label, style: `width:100%;${height ? `height:${height}px` : `aspect-ratio:${columns}/${rows}`}` });
  paint(canvas, rows, columns, value);
  let at = [0, 0];
  const go = (row, column, x, y) => {
    at = [Math.max(0, Math.min(rows - 1, row)), Math.max(0, Math.min(columns - 1, column))];
    const box = canvas.getBoundingClientRect();
    point(...at, x ?? box.left + ((at[1] + 0.5) / columns) * box.width, y ?? box.top + ((at[0] + 0.5) / rows) * box.height);
  };
  const under = (event) => {
    const box = canvas.getBoundingClientRect();
    go(Math.floor(((event.clientY - box.top) / box.height) * rows), Math.floor(((event.clientX - box.left) / box.width) * columns), event.clientX, event.clientY);
  };
  canvas.addEventListener("pointermove", under);
  canvas.addEventListener("pointerdown", under);
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("blur", leave);
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (move) { event.preventDefault(); go(at[0] + move[0], at[1] + move[1]); }
  });
  return canvas;
}

/** Names beside and below a map, where they can be read. */
function labelled(map, rows, columns, heading) {
  const names = (list, kind) => el("div", { class: kind, "aria-hidden": "true" }, ...(list.length <= 26 ? list : []).map((name) => el("span", {}, name)));
  return el("div", { class: "labelled" }, el("span", { class: "corner" }, heading[0]), names(rows, "down"), map, names(columns, "across"), el("span", { class: "corner end" }, heading[1]));
}

/** Numbers to take away; quoted where a name would break the line. A text that a spreadsheet would run is disarmed. */
function download(name, rows) {
  const cell = (value) => {
    let text = String(value ?? "");
    if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`;
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return el("button", { type: "button", onclick: () => {
    const url = URL.createObjectURL(new Blob([`${rows().map((row) => row.map(cell).join(",")).join("\r\n")}\r\n`], { type: "text/csv" }));
    const link = el("a", { href: url, download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  } }, name);
}
