"""The protocol without a transport: sums, vanishing clients, masks, and messages that are refused."""

import numpy as np
import pytest

pytest.importorskip("flwr")

from secure_federation import LENGTH, Federation

from fedpara.errors import WireError
from fedpara.secure import SecAgg
from fedpara.secure import primitives as p
from fedpara.secure.client import Participant
from fedpara.secure.fixed_point import packed, quantized, restored, unpacked
from fedpara.secure.messages import STAGES, read, write
from fedpara.secure.server import Skipped


@pytest.mark.parametrize(
    ("how", "clients"),
    [
        (SecAgg(), 5),
        (SecAgg(clip=0.3, bits=12), 3),
        (SecAgg(bits=32, clip=2.0), 9),
        (SecAgg(neighbours=4), 12),
        (SecAgg(bits=16, range=0.2), 4),
    ],
)
def test_the_sum_is_the_weighted_sum_of_the_clipped_updates(how, clients):
    federation = Federation(how, clients)
    total, weight = federation.run()
    assert np.abs(total - federation.expected(federation.clients)).max() <= clients * how.step
    assert weight == pytest.approx(sum(federation.weights.values()))


@pytest.mark.parametrize("how", [SecAgg(), SecAgg(neighbours=6, threshold=0.55)])
@pytest.mark.parametrize("stage", STAGES)
def test_clients_may_vanish_at_each_stage(how, stage):
    federation = Federation(how, 9, {stage: [11, 17]})
    total, _ = federation.run()
    alive = [c for c in federation.clients if stage == "unmask" or c not in (11, 17)]
    assert np.abs(total - federation.expected(alive)).max() <= 9 * how.step


@pytest.mark.parametrize("stage", STAGES)
def test_a_round_below_the_threshold_is_skipped(stage):
    federation = Federation(SecAgg(threshold=0.8), 5, {stage: [10, 14]})
    with pytest.raises(Skipped, match=r"3 of 5 clients .*: expected at least 4"):
        federation.run()


def test_a_cohort_of_two_is_skipped():
    with pytest.raises(Skipped, match="2 clients are too few"):
        Federation(clients=2).run()


def test_what_the_server_receives_is_uncorrelated_with_the_update():
    """|r| < 3.29 / sqrt(n) holds for 99.9% of independent vectors; the unmasked vector is far outside."""
    federation = Federation(SecAgg(), 3, scale=0.01, length=20_000)
    federation.run()
    width, bound = federation.server.width, 3.29 / 20_000**0.5
    for client, message in federation.seen["masked"].items():
        got = read(message, "masked", 3, f"client:{client}", {"masked": (np.uint8, (20_000, width))})[
            "masked"
        ]
        masked, update = unpacked(got, width).astype(float), federation.updates[client]
        assert abs(np.corrcoef(masked, update)[0, 1]) < bound
        for column in range(width):
            assert abs(np.corrcoef(got[:, column], update)[0, 1]) < bound
        assert got.tobytes() not in b"".join(federation.seen["unmask"].values())
        plain = quantized(update, 1.0, federation.how, width, np.random.default_rng(0))
        assert np.corrcoef(restored(plain, federation.how, width)[0], update)[0, 1] > 0.99


def test_masks_are_uniform_and_need_every_bit_of_the_key():
    numbers = p.mask(b"k" * 32, 50_000, 3)
    counts = np.bincount(numbers >> 20, minlength=16)
    assert len(counts) == 16
    assert abs(counts - 3125).max() < 5 * 3125**0.5
    assert int(numbers.max()) >= (1 << 24) - 4096
    flipped = p.mask(bytes([b"k"[0] ^ 1]) + b"k" * 31, 50_000, 3)
    assert (flipped == numbers).mean() < 0.001


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 8])
def test_numbers_survive_packing(width):
    numbers = np.random.default_rng(0).integers(0, (1 << 8 * width) - 1, 100, dtype=np.uint64, endpoint=True)
    ring = numbers.astype(np.uint32 if width <= 4 else np.uint64)
    assert (unpacked(packed(ring, width), width) == ring).all()


def test_rounding_is_unbiased_and_within_a_step():
    how, d = SecAgg(bits=8), np.full(20_000, 0.1)
    got = restored(quantized(d, 1.0, how, 2, np.random.default_rng(0)), how, 2)[0]
    assert np.abs(got - d).max() <= how.step
    assert abs(got.mean() - 0.1) < 4 * how.step / 20_000**0.5


def test_a_client_that_does_not_clip_is_noticed_in_the_sum():
    federation = Federation()
    federation.weights[12], federation.updates[12] = 1.0, np.full(LENGTH, 0.9)
    federation.settings[12] = SecAgg(clip=1000.0, range=1.0)
    with pytest.raises(Skipped, match="the norm of the sum is"):
        federation.run()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["empty", "cut", "pickle", "another round", "another client", "other names"])
def test_malformed_messages_are_refused(stage, how):
    def change(at, client, message):
        if at != stage or client != 12:
            return message
        return {
            "empty": b"",
            "cut": message[:-1],
            "pickle": b"\x80\x04cposix\nsystem\n(S'touch /tmp/no'\ntR.",
            "another round": write(stage, 4, "client:12", {"box": np.zeros(1)}),
            "another client": federation.seen_of_another(stage),
            "other names": write(stage, 3, "client:12", {"box": np.zeros(1)}),
        }[how]

    federation = Federation(clients=6)
    federation.seen_of_another = lambda at: write(at, 3, "client:13", {"box": np.zeros(1)})
    federation.change = change
    total, _ = federation.run()
    assert [*federation.server.refused] == [12]
    alive = [c for c in federation.clients if c != 12 or stage == "unmask"]
    assert np.abs(total - federation.expected(alive)).max() <= 6 * federation.how.step


def test_a_false_share_does_not_end_the_round():
    def change(stage, client, message):
        if (stage, client) != ("unmask", 13):
            return message
        spec = {"clients": (np.int64, (None,)), "shares": (np.uint8, (None, p.SHARE))}
        got = read(message, stage, 3, "client:13", spec)
        return write(stage, 3, "client:13", {**got, "shares": got["shares"] ^ np.uint8(255)})

    federation = Federation(clients=6, vanish={"masked": [10]})
    federation.change = change
    total, _ = federation.run()
    assert np.abs(total - federation.expected(federation.clients[1:])).max() <= 6 * federation.how.step


def test_a_client_answers_each_stage_once_and_in_order():
    """A second answer to `unmask` could reveal the other secret of a client."""
    federation = Federation()
    federation.run()
    person = federation.people[10]
    for stage in ("masked", "unmask"):
        with pytest.raises(WireError, match="each stage happens once"):
            getattr(person, stage)(b"", *[None] * 2 * (stage == "masked"))
    fresh = Participant.fresh(SecAgg(), 3, 1)
    fresh.keys()
    with pytest.raises(WireError, match="stage 'unmask' after 'keys'"):
        fresh.unmask(b"")


@pytest.mark.parametrize(
    ("alive", "why"),
    [
        ([False] * 5, "does not name it"),
        ([True, False, False, False, False], "1 of its neighbours are alive"),
    ],
)
def test_a_client_reveals_nothing_if_too_few_are_alive(alive, why):
    federation = Federation()
    federation.vanish = {"unmask": federation.clients}
    with pytest.raises(Skipped):
        federation.run()
    lie = write("unmask", 3, "server", {"clients": np.array(federation.clients), "alive": np.array(alive)})
    with pytest.raises(WireError, match=why):
        federation.people[10].unmask(lie)


def test_seeded_secrets_repeat_and_fresh_ones_do_not():
    assert p.seeded_secret(1, "box", 2) == p.seeded_secret(1, "box", 2) != p.seeded_secret(1, "box", 3)
    assert p.fresh_secret() != p.fresh_secret()


@pytest.mark.parametrize("how", [SecAgg(), SecAgg(neighbours=4)])
@pytest.mark.parametrize("case", ["no point", "one key twice", "another client's key"])
def test_unusable_keys_are_refused_and_the_others_go_on(case, how):
    """Its neighbours would stop at such a key, all of them."""

    def change(stage, client, message):
        if (stage, client) != ("keys", 13):
            return message
        keys = {name: np.frombuffer(part, np.uint8) for name, part in keys_of(13).items()}
        keys["mask"] = {
            "no point": np.full(p.PUBLIC, 255, np.uint8),
            "one key twice": keys["box"],
            "another client's key": np.frombuffer(keys_of(12)["box"], np.uint8),
        }[case]
        return write(stage, 3, "client:13", keys)

    def keys_of(client):
        person = federation.people[client]
        return {
            "box": p.public_key(person.box),
            "mask": p.public_key(person.mask),
            "own": p.commitment(person.own),
        }

    federation = Federation(how, clients=12)
    federation.change = change
    total, _ = federation.run()
    refused = federation.server.refused
    assert refused[13].startswith("one of its public keys ")
    assert set(refused) == ({12, 13} if case == "another client's key" else {13})
    alive = [client for client in federation.clients if client not in refused]
    assert np.abs(total - federation.expected(alive)).max() <= 12 * how.step


def test_a_client_without_a_weight_is_refused():
    federation = Federation()
    federation.weights[12] = 0.0
    total, _ = federation.run()
    assert federation.server.refused == {12: "it holds no examples"}
    assert np.abs(total - federation.expected([10, 11, 13, 14])).max() <= 5 * federation.how.step
