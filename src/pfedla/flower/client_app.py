"""The site's side of a Flower app. Flower starts a process for every message, so all that lasts is in the site's folder."""

import sys

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from pfedla.core.errors import PfedlaError
from pfedla.flower.codec import CONFIG
from pfedla.flower.plan import Plan
from pfedla.flower.site import Site, cohort_of

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    return reply(message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    return reply(message, context)


@app.query()
def query(message: Message, context: Context) -> Message:
    return reply(message, context)


def reply(message: Message, context: Context) -> Message:
    """The answer to any message; what cannot be is said here and there, in the same sentence."""
    try:
        content = answered(message.content, context)
    except PfedlaError as error:
        print(f"pfedla: {error}", file=sys.stderr, flush=True)
        content = RecordDict({CONFIG: ConfigRecord({"refusal": str(error)})})
    return Message(content, reply_to=message)


def answered(content: RecordDict, context: Context) -> RecordDict:
    config = content.config_records[CONFIG]
    action = str(config["action"])
    site = Site(Plan.of_run_config(context.run_config), config, context.node_config)
    if action == "join":
        return site.join()
    cohort, base = cohort_of(config), int(str(config["base"]))
    if action == "train":
        return site.train(content, cohort, base)
    return site.evaluate(content, cohort, base)
