"""The ClientApp, which Flower runs on a node. A deployment starts a process per message."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedpara.apps.flower.grid import from_records, to_records
from fedpara.apps.flower.node import respond
from fedpara.engines.flower.rpc import Packet
from fedpara.references import search_working_directory_last

app = ClientApp()


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
    return Message(to_records(respond(request, context.node_config)), reply_to=message)
