"""The ClientApp, which Flower runs on a node. A deployment starts a process per message."""

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from fedpara.apps.flower.grid import from_records, to_records
from fedpara.apps.flower.node import respond
from fedpara.engines.flower.rpc import Packet
from fedpara.references import search_working_directory_last

app = ClientApp()
KEPT = "fedpara"


@app.query()
def hello(message: Message, context: Context) -> Message:
    return _respond(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    return _respond(message, context)


@app.evaluate()
def score(message: Message, context: Context) -> Message:
    return _respond(message, context)


def _respond(message: Message, context: Context) -> Message:
    search_working_directory_last()  # the copy of a module in the app has precedence
    packet = from_records(message.content)
    request = packet if isinstance(packet, Packet) else Packet({})
    kept = _kept(context)
    response = respond(request, context.node_config, kept)
    context.state[KEPT] = ConfigRecord(dict(kept))
    return Message(to_records(response), reply_to=message)


def _kept(context: Context) -> dict[str, bytes]:
    """What this node keeps in memory between requests. It is lost when the node stops."""
    record = context.state.get(KEPT)
    held = record.items() if isinstance(record, ConfigRecord) else ()
    return {name: value for name, value in held if isinstance(value, bytes)}
