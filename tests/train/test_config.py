"""The configuration: what it accepts, how overrides apply, and what its errors say."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.core.errors import InputError
from shardwise.train import config
from shardwise.train.learning import learning_rate

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.toml"


def test_an_empty_file_is_a_run() -> None:
    """Every key has a default."""
    assert config.build({}) == config.Config()


def test_the_quickstart_is_sharded_over_two_ranks() -> None:
    """The example that make train runs says dp2 zero3 on the standard library's source."""
    quickstart = config.read(EXAMPLE)
    assert quickstart.plan.text == "dp2 zero3"
    assert quickstart.data.source == "stdlib"
    assert quickstart.run.folder == "runs/quickstart"


@settings(deadline=None, max_examples=40)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    lr=st.floats(1e-6, 1.0),
    layers=st.none() | st.integers(1, 99),
    tied=st.none() | st.booleans(),
)
def test_what_is_written_reads_back(
    text: str, lr: float, layers: int | None, tied: bool | None
) -> None:
    """config.toml in the run folder holds exactly the configuration that ran."""
    import tomllib

    given_values = {
        "run": {"folder": text},
        "train": {"lr": lr},
        "model": {"layers": layers, "tied": tied},
    }
    before = config.build(given_values)
    assert config.build(tomllib.loads(config.dump(before))) == before


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=7", 7),
        ("train.steps = 7", 7),
        ("train.decay=linear", "linear"),
        ("plan.text=dp2 zero3", "dp2 zero3"),
        ("train.betas=[0.8, 0.9]", (0.8, 0.9)),
        ("run.folder=a=b", "a=b"),
    ],
)
def test_an_override_sets_one_key(override: str, expected: object) -> None:
    """--set takes a TOML value, or text where it is none, and replaces the file's."""
    values = config.override({"train": {"steps": 3}}, [override])
    section, name = override.partition("=")[0].strip().split(".")
    assert getattr(getattr(config.build(values), section), name) == expected


@pytest.mark.parametrize(
    ("values", "phrases"),
    [
        ({"train": {"step": 3}}, ["unknown key train.step", "train.steps"]),
        ({"trian": {"steps": 3}}, ["unknown key trian", "train"]),
        ({"steps": 3}, ["unknown key steps", "train.steps"]),
        ({"model": {"lr": 3}}, ["unknown key model.lr", "train.lr"]),
        ({"train": {"steps": 0}}, ["train.steps = 0", "greater than or equal to 1"]),
        ({"train": {"lr": "fast"}}, ['train.lr = "fast"', "a valid number", "train.lr = 0.001"]),
        ({"train": {"decay": "step"}}, ["'cosine', 'linear' or 'constant'"]),
        ({"train": {"lr": float("nan")}}, ["train.lr = NaN", "finite"]),
        ({"train": 3}, ["train = 3", "[train]"]),
    ],
)
def test_a_bad_value_is_answered_with_its_remedy(
    values: dict[str, object], phrases: list[str]
) -> None:
    """A bad key or value names itself, what is allowed, and what to write instead."""
    with pytest.raises(InputError) as error:
        config.build(values)
    assert all(phrase in str(error.value) for phrase in phrases), str(error.value)
    assert "pydantic" not in str(error.value)


def test_everything_wrong_is_said_at_once() -> None:
    """Two mistakes give two answers."""
    with pytest.raises(InputError, match=r"(?s)data\.sauce.*train\.steps"):
        config.build({"train": {"steps": -1}, "data": {"sauce": "x"}})


@pytest.mark.parametrize("text", ["steps", "train.steps", "steps=3", ".steps=3", "train.=3"])
def test_an_override_without_its_parts_is_refused(text: str) -> None:
    """--set wants a section, a key and a value."""
    with pytest.raises(InputError, match=r"section\.key=value"):
        config.override({}, [text])


def test_a_file_that_is_missing_or_not_toml_is_refused(tmp_path: Path) -> None:
    """The file's name is in the answer."""
    with pytest.raises(InputError, match=r"absent\.toml"):
        config.read(tmp_path / "absent.toml")
    (tmp_path / "broken.toml").write_text("[train\nsteps")
    with pytest.raises(InputError, match=r"broken\.toml, which is not TOML"):
        config.read(tmp_path / "broken.toml")


@pytest.mark.parametrize("decay", ["cosine", "linear", "constant"])
def test_the_rate_rises_peaks_and_ends_where_it_should(decay: str) -> None:
    """Warmup is linear to lr, nothing exceeds lr, the last step has the final share of it."""
    train = config.build(
        {"train": {"steps": 50, "warmup": 10, "lr": 0.5, "final": 0.2, "decay": decay}}
    ).train
    rates = [learning_rate(step, train) for step in range(50)]
    assert rates[:10] == pytest.approx([0.05 * (step + 1) for step in range(10)])
    assert max(rates) == rates[10] == 0.5
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.5 if decay == "constant" else 0.1)
