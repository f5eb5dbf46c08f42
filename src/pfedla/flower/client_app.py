"""The site's side of the Flower app. Flower starts a process per message; state is in the site's folder."""

import sys

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from pfedla.core.errors import PfedlaError
from pfedla.flower.codec import CONFIG
from pfedla.flower.deployment import Deployment
from pfedla.flower.site import Site, read_cohort


def reply(message: Message, context: Context) -> Message:
    """Return the answer to any message. The site's log and the server get the same reason for a refusal."""
    try:
        content = answer(message.content, context)
    except PfedlaError as error:
        print(f"pfedla: {error}", file=sys.stderr, flush=True)
        content = RecordDict({CONFIG: ConfigRecord({"refusal": str(error)})})
    return Message(content, reply_to=message)


def answer(content: RecordDict, context: Context) -> RecordDict:
    config = content.config_records[CONFIG]
    site = Site(Deployment.from_run_config(context.run_config), config, context.node_config)
    if config["action"] == "join":
        return site.join()
    cohort, base = read_cohort(config), int(str(config["base"]))
    return (site.train if config["action"] == "train" else site.evaluate)(content, cohort, base)


app = ClientApp()
for _register in (app.train, app.evaluate, app.query):
    _register()(reply)
