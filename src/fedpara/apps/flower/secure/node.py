"""A node's side of secure aggregation: one stage of one client per request.

Between two stages the client's secrets are in `kept`, which the node holds in memory. A restarted node has lost them,
and its clients have left the round.
"""

from collections.abc import MutableMapping
from dataclasses import replace

import fedpara
from fedpara.apps.flower.node import NodeConfig, train_client
from fedpara.engines.flower.rpc import Request, Response
from fedpara.engines.flower.secure import split_bodies
from fedpara.engines.secure.vector import masked_reply
from fedpara.errors import RunError
from fedpara.experiments.config import Experiment
from fedpara.secure import SecAgg, read_secure
from fedpara.secure.client import Participant

Kept = MutableMapping[str, bytes]


def respond_stage(request: Request, node_config: NodeConfig, experiment: Experiment, kept: Kept) -> Response:
    if request.version != fedpara.__version__:
        raise RunError(f"the node runs fedpara {fedpara.__version__}, the server {request.version}.")
    if experiment.secure is None:
        raise RunError(f"stage {request.kind!r} of a run without secure aggregation.")
    how, name = read_secure(experiment.secure), f"{request.run}:{request.client}"
    # Removed first, so that a failed stage cannot be repeated.
    dumped = kept.pop(name, b"")
    participant = _participant(request, how, dumped)
    if request.kind == "masked":
        response = _masked(request, node_config, participant)
    else:
        arguments = () if request.kind == "keys" else (request.message,)
        message: bytes = getattr(participant, request.kind)(*arguments)
        response = Response(request.client, request.round, message)
    if request.kind != "unmask":
        kept[name] = request.round.to_bytes(8, "little") + participant.dump()
    return response


def _participant(request: Request, how: SecAgg, dumped: bytes) -> Participant:
    if request.kind == "keys":
        return Participant.fresh(how, request.round, request.client)
    if int.from_bytes(dumped[:8], "little") != request.round:
        raise RunError(
            f"this node has no secrets of client {request.client} for round {request.round}: it was restarted, or the "
            "client missed a stage."
        )
    return Participant.restore(how, request.round, request.client, dumped[8:])


def _masked(request: Request, node_config: NodeConfig, participant: Participant) -> Response:
    body, model = split_bodies(request.message)
    site, sent, reply = train_client(replace(request, message=model), node_config)
    if reply.message is None:
        return Response(request.client, request.round, reason=reply.reason)
    masked, why = masked_reply(site.session, participant, body, reply, sent)
    return Response(request.client, request.round, masked, why, reply.loss, reply.before, reply.after)
