"""The ClientApp: what `flwr` runs on a node, one message a process in a deployment."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedpara.apps.flower.grid import from_records, to_records
from fedpara.apps.flower.node import answer
from fedpara.engines.flower.rpc import Packet

app = ClientApp()


@app.query()
def hello(message: Message, context: Context) -> Message:
    return _answered(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    return _answered(message, context)


@app.evaluate()
def score(message: Message, context: Context) -> Message:
    return _answered(message, context)


def _answered(message: Message, context: Context) -> Message:
    packet = from_records(message.content)
    given = packet if isinstance(packet, Packet) else Packet({})
    return Message(to_records(answer(given, context.node_config)), reply_to=message)
