"""LoRA: what it trains, what travels, merging; and FedSA-LoRA, which shares A and keeps B."""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pfedla
from pfedla.algorithms import create
from pfedla.core.errors import NotApplicableError, PfedlaError
from pfedla.core.layers import Layers
from pfedla.core.lora import lora, merge_lora
from pfedla.core.settings import Training
from pfedla.core.tasks import load_tensors, task_of
from pfedla.data.federation import Examples, Federation


class Attention(nn.Module):
    """A tiny transformer block with the positions of BERT: constants, one of them saved."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 3)
        self.register_buffer("position_ids", torch.arange(4))
        self.register_buffer("scale", torch.tensor(6**-0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position_ids[:, None]
        weights = (self.query(x) @ self.key(x).transpose(-2, -1) * self.scale).softmax(-1)
        return self.head((weights @ self.value(x)).mean(1))  # type: ignore[no-any-return]


@pytest.fixture
def base() -> nn.Module:
    torch.manual_seed(0)
    return Attention()


def adapt(base: nn.Module, **options: object) -> nn.Module:
    return lora(base, 2, 4.0, ("query", "value"), **options)  # type: ignore[arg-type]


def perturb(model: nn.Module) -> nn.Module:
    """Return a copy whose trained parameters have moved."""
    moved = copy.deepcopy(model)
    for value in moved.parameters():
        if value.requires_grad:
            value.data += 0.3 * torch.randn(value.shape, generator=torch.Generator().manual_seed(value.numel()))
    return moved


def trained(model: nn.Module) -> dict[str, int]:
    return {name: value.numel() for name, value in model.named_parameters() if value.requires_grad}


@pytest.fixture
def federation() -> Federation:
    x, y = torch.randn(60, 4, 6, generator=torch.Generator().manual_seed(1)), torch.arange(60) % 3
    train, test = ([Examples(x[at : at + 10], y[at : at + 10]) for at in range(start, 60, 20)] for start in (0, 10))
    return Federation(train, test, ("a", "b", "c"))


def test_starts_as_the_base_model_and_leaves_it_alone(base: nn.Module) -> None:
    x, before = torch.randn(5, 4, 6), copy.deepcopy(base.state_dict())
    model = adapt(base)
    assert torch.equal(model(x), base(x))
    perturb(model)
    assert all(value.requires_grad for value in base.parameters())
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())


def test_trains_only_the_adapters_and_the_head(base: nn.Module) -> None:
    model = adapt(base)
    assert Layers.of(model).names == ("query.lora_a", "query.lora_b", "value.lora_a", "value.lora_b", "head")
    assert trained(model).keys() == {
        f"{part}.{ab}.weight" for part in ("query", "value") for ab in ("lora_a", "lora_b")
    } | {"head.weight", "head.bias"}
    assert model.get_parameter("key.weight").data_ptr() == base.get_parameter("key.weight").data_ptr()
    assert model.get_parameter("head.weight").data_ptr() != base.get_parameter("head.weight").data_ptr()


def test_ffa_lora_trains_b_alone(base: nn.Module) -> None:
    model = adapt(base, freeze_a=True, trained=())
    assert trained(model) == {"query.lora_b.weight": 12, "value.lora_b.weight": 12}


def test_a_is_drawn_from_the_seed(base: nn.Module) -> None:
    first, again, other = (adapt(base, seed=seed).get_parameter("query.lora_a.weight") for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_merged_model_equals_the_wrapped_one(base: nn.Module) -> None:
    model, x = perturb(adapt(base)), torch.randn(5, 4, 6)
    merged = merge_lora(model)
    assert merged.state_dict().keys() == base.state_dict().keys()
    assert type(merged.get_submodule("query")) is nn.Linear
    assert not torch.allclose(model(x), base(x))
    torch.testing.assert_close(merged(x), model(x), rtol=1e-6, atol=1e-6)


def test_modules_that_read_the_weight_see_the_adapter() -> None:
    # nn.TransformerEncoderLayer reads the weights of its Linear layers in eval mode and of out_proj always.
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 2))
    model = perturb(lora(model, 2, 2.0, ("linear1", "linear2", "out_proj")))
    x = torch.randn(3, 3, 8)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), model.train()(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(merge_lora(model)(x), model(x), rtol=1e-5, atol=1e-5)


def test_constant_buffers_are_no_statistics(base: nn.Module) -> None:
    layers = Layers.of(adapt(base))
    assert not layers.statistics
    assert {"position_ids", "scale"} <= layers.frozen
    norm = Layers.of(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert norm.statistics == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


@pytest.mark.parametrize(
    ("method", "private"),
    [("fedavg", ()), ("pfedla", ()), ("fedrep", ("head.",)), ("fedsa-lora", ("head.", "lora_b.")), ("local", ("",))],
)
@pytest.mark.parametrize("engine", ["threaded", "vectorized"])
def test_only_adapters_and_head_travel(
    base: nn.Module, federation: Federation, method: str, private: tuple[str, ...], engine: str
) -> None:
    model, rounds = adapt(base), 2
    how = {"rounds": rounds, "local_epochs": 2, "lr": 0.1, "optimizer": "adamw", "engine": engine, "progress": False}
    result = pfedla.simulate(federation, model, method, **how)
    sent = sum(size for name, size in trained(model).items() if not any(part in name for part in private))
    assert result.traffic.down_bytes == result.traffic.up_bytes == 4 * sent * len(federation) * rounds
    for number, tensors in enumerate(result.models):
        assert tensors.keys() == trained(model).keys()
        personal = result.personal_model(number)
        assert torch.equal(personal.get_parameter("query.base.weight"), base.get_parameter("query.weight"))


def test_fedsa_lora_averages_a_and_keeps_b(base: nn.Module, federation: Federation) -> None:
    how = {"rounds": 2, "local_epochs": 2, "lr": 0.1, "progress": False}
    kept = pfedla.simulate(federation, adapt(base), "fedsa-lora", **how).models
    shared_head = pfedla.simulate(federation, adapt(base), "fedsa-lora", private="", **how).models
    for models, head_is_equal in ((kept, False), (shared_head, True)):
        assert torch.equal(models[0]["query.lora_a.weight"], models[1]["query.lora_a.weight"])
        assert not torch.equal(models[0]["query.lora_b.weight"], models[1]["query.lora_b.weight"])
        assert torch.equal(models[0]["head.weight"], models[1]["head.weight"]) is head_is_equal


def test_fedsa_lora_needs_both_factors(base: nn.Module) -> None:
    for model in (base, adapt(base, freeze_a=True)):
        method = create("fedsa-lora", task_of(model), Training(lr=0.1))
        with pytest.raises(NotApplicableError, match="lora_"):
            method.check(3)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"targets": ("querry",)}, "query, key, value, head"),
        ({"targets": ()}, "targets"),
        ({"targets": "head"}, "head"),
        ({"rank": 0}, "rank = 0"),
        ({"rank": 7}, "rank = 7"),
        ({"alpha": 0.0}, "alpha"),
        ({"trained": "norm"}, "norm"),
    ],
)
def test_wrong_arguments_are_named(base: nn.Module, changes: dict[str, object], named: str) -> None:
    arguments: dict[str, object] = {"rank": 2, "alpha": 4.0, "targets": ("query",)} | changes
    with pytest.raises(PfedlaError, match=named):
        lora(base, **arguments)  # type: ignore[arg-type]


def test_peft_works_by_its_structure(base: nn.Module, federation: Federation) -> None:
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["query", "value"], modules_to_save=["head"])
    model = peft.get_peft_model(copy.deepcopy(base), config).base_model.model
    result = pfedla.simulate(federation, model, "fedsa-lora", rounds=2, local_epochs=2, lr=0.1, progress=False)
    a = sum(size for name, size in trained(model).items() if "lora_A" in name)
    assert result.traffic.up_bytes == 4 * a * len(federation) * 2
    assert load_tensors(model, result.models[0])(torch.randn(2, 4, 6)).shape == (2, 3)


def test_the_committed_tables_are_made_of_the_committed_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[1]
    monkeypatch.syspath_prepend(root / "experiments" / "lora")
    import sentiment

    known = json.loads((root / "results" / "lora" / "results.json").read_text())
    for page in (root / "results" / "lora" / "README.md", root / "docs" / "lora.md"):
        for write in (sentiment.write_table, sentiment.write_bytes, sentiment.write_weights):
            assert write(known) in page.read_text(encoding="utf-8")
