"""Messages in rows: the same bytes and the same checks as messages that are made one by one."""

import pytest
import torch

from fedpara.errors import UpdateRejected
from fedpara.layout import joined
from fedpara.wire import Header, admit, make_message, spec_of
from fedpara.wire.check import admit_row
from fedpara.wire.rows import RowMessage, Rows

COUNT = 3
HEADERS = [Header(2, "fedavg", "original", f"client:{i}", 5 + i) for i in range(COUNT)]


def states():
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "b.weight": torch.randn(4, 3, generator=generator),
            "bn.running_var": torch.rand(5, generator=generator),
            "bn.num_batches_tracked": torch.tensor(7 + i),
            "a.bias": torch.randn(1, generator=generator).double(),
            "empty": torch.zeros(0, 3),
        }
        for i in range(COUNT)
    ]


def rows_of(given):
    return Rows.of(
        {name: torch.stack([state[name] for state in given]) for name in given[0]}, spec_of(given[0])
    )


def admitted(message, header, **other):
    wanted = {"round": 2, "method": "fedavg", "scheme": "original", "examples": header.examples, **other}
    return admit_row(message, **{"spec": spec_of(states()[0]), **wanted})


def test_the_bytes_of_a_message():
    given = states()
    rows = rows_of(given)
    for i, header in enumerate(HEADERS):
        message, expected = RowMessage(rows, i, header), make_message(given[i], header)
        assert bytes(message) == bytes(expected)
        assert len(message) == len(bytes(expected))
        assert message.tensors.keys() == expected.tensors.keys()
        assert admitted(message, header) == header
        _, state = admit(
            message, spec=spec_of(given[i]), round=2, method="fedavg", scheme="original", link="float32"
        )
        assert all(torch.equal(state[name], tensor) for name, tensor in given[i].items())


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("b.weight", float("nan"), "'b.weight' holds NaN"),
        ("a.bias", float("inf"), "'a.bias' holds NaN"),
        ("bn.running_var", -1.0, "negative variance"),
    ],
)
def test_only_the_bad_row_is_refused(name, value, reason):
    given = states()
    given[1][name].view(-1)[0] = value
    rows = rows_of(given)
    for i, header in enumerate(HEADERS):
        message = RowMessage(rows, i, header)
        if i == 1:
            with pytest.raises(UpdateRejected, match=reason):
                admitted(message, header)
        else:
            assert admitted(message, header) == header


def test_numbers_whose_squares_overflow_are_finite():
    given = states()
    given[2]["b.weight"].fill_(3e38)
    assert rows_of(given).finite == [True] * COUNT


def with_variables(i, header):
    """(a message with variables beside its row, the same state packed)"""
    given, generator = states(), torch.Generator().manual_seed(1)
    packed, blocks = {}, {}
    for variable in ("c", "z"):
        state = {
            name: torch.randn(t.shape, generator=generator).to(t.dtype)
            for name, t in given[i].items()
            if t.is_floating_point()
        }
        packed |= {f"{variable}/{name}": t for name, t in state.items()}
        blocks |= {f"{variable}/{kind}": block for kind, block in joined(state).items()}
    packed |= given[i]
    rows = Rows.of({name: torch.stack([s[name] for s in given]) for name in given[0]}, spec_of(packed))
    return RowMessage(rows, i, header, blocks), packed


def test_variables_beside_a_row():
    for i, header in enumerate(HEADERS):
        message, packed = with_variables(i, header)
        expected = make_message(packed, header)
        assert bytes(message) == bytes(expected)
        assert len(message) == len(bytes(expected))
        assert list(message.tensors) == list(expected.tensors)
        assert admitted(message, header, spec=spec_of(packed)) == header


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_nan_in_a_variable_is_refused(kind):
    message, packed = with_variables(1, HEADERS[1])
    message.variables[f"c/{kind}"][-1] = float("nan")
    with pytest.raises(UpdateRejected, match=r"'c/.*' holds NaN"):
        admitted(message, HEADERS[1], spec=spec_of(packed))


@pytest.mark.parametrize("field", ["round", "method", "scheme", "examples"])
def test_a_header_of_another_run_is_refused(field):
    message = RowMessage(rows_of(states()), 0, HEADERS[0])
    with pytest.raises(UpdateRejected, match=field):
        admitted(message, HEADERS[0], **{field: 99 if field in ("round", "examples") else "other"})


def test_another_shape_is_refused():
    message = RowMessage(rows_of(states()), 0, HEADERS[0])
    spec = {**spec_of(states()[0]), "b.weight": (torch.float32, torch.Size([3, 4]))}
    with pytest.raises(UpdateRejected, match="shape"):
        admitted(message, HEADERS[0], spec=spec)
