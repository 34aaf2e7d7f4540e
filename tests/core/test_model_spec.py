"""A model as numbers."""

import pytest

from shardwise.core.model_spec import ELEMENT_BYTES, ModelShape, ParamShape, UnitShape


def test_counts():
    """A model has the parameters of its units, in their order."""
    weight, bias = ParamShape("a.weight", (3, 4)), ParamShape("a.bias", (3,), "bfloat16")
    scalar = ParamShape("b.scale", (), trainable=False)
    model = ModelShape((UnitShape("a", (weight, bias)), UnitShape("b", (scalar,))))
    assert model.params == (weight, bias, scalar)
    assert [unit.numel for unit in model.units] == [15, 1]
    assert model.numel == 16
    assert [param.element_bytes for param in model.params] == [4, 2, 4]


@pytest.mark.parametrize("name", ELEMENT_BYTES)
def test_element_bytes_are_torchs(name: str):
    """The table of element sizes agrees with torch."""
    torch = pytest.importorskip("torch")
    assert getattr(torch, name).itemsize == ELEMENT_BYTES[name]
