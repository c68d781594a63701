"""draw_ahead: the random numbers of a cohort's messages, drawn on the host while a GPU trains."""

from collections.abc import Sequence

from fedpara.algorithms import Variables
from fedpara.engines.memory import MAX_READ_AHEAD
from fedpara.engines.rng import uplink_rng
from fedpara.engines.session import Session
from fedpara.engines.threads import map_in_threads
from fedpara.wire.encoders.draws import DrawnAhead


def draw_ahead(
    session: Session, round: int, clients: Sequence[int], down: Variables
) -> dict[int, DrawnAhead]:
    """The generators of these clients' messages, with their numbers drawn into pinned memory, in threads.

    Empty if the uplink draws no uniform numbers, or if they need more than MAX_READ_AHEAD bytes. Each message then
    draws its own.
    """
    spec = session.up_in(round, down)
    count = session.link.uplink.uniforms(kind for name, kind in spec.items() if name not in session.exact)
    if not 0 < 4 * count * len(clients) <= MAX_READ_AHEAD:
        return {}
    generators = {client: uplink_rng(session.seed, round, client) for client in clients}
    map_in_threads(lambda generator: generator.draw(count, pinned=True), generators.values())
    return generators
