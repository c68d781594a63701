"""The ClientApp: what `flwr` runs on a node, one message a process in a deployment."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedpara.apps.flower_grid import from_records, to_records
from fedpara.apps.flower_node import answer
from fedpara.engines.parcels import Parcel

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
    parcel = from_records(message.content)
    given = parcel if isinstance(parcel, Parcel) else Parcel({})
    return Message(to_records(answer(given, context.node_config)), reply_to=message)
