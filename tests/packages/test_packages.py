"""Models of other people's packages against themselves with compiled layers, and both against float64.

pytorch-forecasting: subclasses that pack sequences, also of no steps. sb3-contrib: recurrent policies, and learning.
stanza: packed characters, languages, an encoder with a decoder of cells. torch-geometric: neighbours and layers, sets.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

import ecornn.torch

OUTPUTS, GRADIENTS = 1e-5, 2e-5  # relative


def check(model: torch.nn.Module, run: Callable[[Any, Callable[[Any], Any]], Any], swapped: tuple[str, ...],
          kind: torch.dtype = torch.float64) -> None:
    """Replaces the layers ``swapped`` of a model, and compares what ``run`` gives for it, and the gradients of one
    training step, with those of the model itself in float64, or in ``kind`` where the package has no other.

    ``run(model, cast)`` calls the model; ``cast`` makes of floating-point tensors, also in containers, those of the
    model's type. Where the package itself is further from float64 than the limits, twice that far is near enough."""
    exact, plain = copy.deepcopy(model).to(kind), copy.deepcopy(model)
    report = ecornn.torch.replace(model)
    assert report.swapped == swapped, str(report)
    wanted, theirs, found = (step(one, run) for one in (exact, plain, model))
    with torch.no_grad():  # without gradients another module computes
        again = tensors(run(model, cast_for(model)))
    found |= {f"output {n} without gradients": t for n, t in enumerate(again)}
    least = 1e-2 * max(float(g.norm()) for name, g in wanted.items() if name.startswith("gradient"))
    for name, value in found.items():
        right = wanted[name.removesuffix(" without gradients")]
        limit, floor = (GRADIENTS, least) if name.startswith("gradient") else (OUTPUTS, 1e-12)
        near, far = error(theirs[name.removesuffix(" without gradients")], right, floor), error(value, right, floor)
        assert far <= max(limit, 2 * near), f"{name}: {far:.2g}, of the package {near:.2g}"
    assert ecornn.torch.restore(model) == swapped


def step(model: torch.nn.Module, run: Callable[[Any, Callable[[Any], Any]], Any]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.set_default_dtype(type_of(model))  # of what the package makes by itself
    try:
        outputs = tensors(run(model, cast_for(model)))
    finally:
        torch.set_default_dtype(torch.float32)
    assert outputs
    sum((t * torch.linspace(-1, 2, t.numel(), dtype=t.dtype).view(t.shape)).sum() for t in outputs
        if t.requires_grad).backward()
    found = {f"output {n}": t.detach() for n, t in enumerate(outputs)}
    grads = {f"gradient of {n}": w.grad for n, w in model.named_parameters() if w.grad is not None}
    assert grads
    return found | grads


def type_of(model: torch.nn.Module) -> torch.dtype:
    return next(w.dtype for w in model.parameters() if w.is_floating_point())


def cast_for(model: torch.nn.Module) -> Callable[[Any], Any]:
    kind = type_of(model)
    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(kind) if value.is_floating_point() else value
        if isinstance(value, Mapping):
            return {name: cast(one) for name, one in value.items()}
        return type(value)(map(cast, value)) if isinstance(value, (list, tuple)) else value
    return cast


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        value = value.values()
    return [t for part in value for t in tensors(part)] if hasattr(value, "__iter__") else []


def error(found: torch.Tensor, wanted: torch.Tensor, floor: float) -> float:
    assert found.shape == wanted.shape
    value = float((found.double() - wanted).norm() / wanted.norm().clamp_min(floor))
    return value if value == value else float("inf")


@pytest.fixture
def data(package: Callable[[str], Any]) -> Any:
    forecasting, pandas = package("pytorch_forecasting"), package("pandas")
    rows = [{"time": time, "series": name, "value": float(np.sin(time / 3 + number)) + 2, "day": float(time % 5)}
            for number, name in enumerate("abc") for time in range(30)]
    made = forecasting.TimeSeriesDataSet(
        pandas.DataFrame(rows), time_idx="time", target="value", group_ids=["series"], static_categoricals=["series"],
        max_encoder_length=8, min_encoder_length=3, max_prediction_length=4, time_varying_known_reals=["time", "day"],
        time_varying_unknown_reals=["value"])
    return made, next(iter(made.to_dataloader(train=True, batch_size=6, shuffle=False, num_workers=0)))[0]


@pytest.mark.parametrize(("name", "cell", "layers"), [
    ("RecurrentNetwork", "LSTM", ("rnn",)), ("RecurrentNetwork", "GRU", ("rnn",)),
    ("TemporalFusionTransformer", "LSTM", ("lstm_encoder", "lstm_decoder"))])
def test_forecasting_of_a_data_set(name: str, cell: str, layers: tuple[str, ...], data: Any, package: Any):
    torch.manual_seed(0)
    options = {"cell_type": cell, "rnn_layers": 2} if name == "RecurrentNetwork" else {}
    made, x = data
    model = getattr(package("pytorch_forecasting"), name).from_dataset(made, hidden_size=12, **options).eval()
    x["encoder_lengths"][2:] = torch.tensor([5, 0 if name == "TemporalFusionTransformer" else 4, 8, 3])
    check(model, lambda model, cast: model(cast(x))["prediction"], layers)


def test_forecasting_of_no_steps(package: Any):
    rnn = package("pytorch_forecasting.models.nn.rnn")
    torch.manual_seed(0)
    x, h = torch.randn(4, 6, 5), torch.randn(2, 1, 4, 9)
    model = torch.nn.ModuleDict({"layer": rnn.LSTM(5, 9, batch_first=True)})
    check(model, lambda model, cast: model["layer"](cast(x), tuple(cast(h)), lengths=torch.tensor([3, 0, 6, 1]),
                                                    enforce_sorted=False), ("layer",))


@pytest.fixture
def learner(package: Any) -> Any:
    package("gymnasium")
    torch.manual_seed(0)
    return package("sb3_contrib").RecurrentPPO(
        "MlpLstmPolicy", "CartPole-v1", n_steps=16, batch_size=16, n_epochs=2, seed=0, device="cpu",
        policy_kwargs={"lstm_hidden_size": 16, "n_lstm_layers": 1})


@pytest.mark.parametrize("restarts", [False, True], ids=["one episode", "several"])
def test_sb3_evaluating_actions(learner: Any, restarts: bool):
    """The loss's inputs of an update: two sequences, in one call of a layer or step by step where episodes begin."""
    from sb3_contrib.common.recurrent.type_aliases import RNNStates

    steps, sequences = 7, 2
    observations, actions = torch.randn(sequences * steps, 4), torch.randint(2, (sequences * steps,))
    starts = torch.zeros(sequences * steps)
    starts[[3, 9]] = float(restarts)
    states = torch.randn(4, 1, sequences, 16)
    def run(policy: Any, cast: Any) -> Any:
        given = RNNStates(tuple(cast(states[:2])), tuple(cast(states[2:])))
        return policy.evaluate_actions(cast(observations), actions, given, cast(starts))
    check(learner.policy, run, ("lstm_actor", "lstm_critic"), torch.float32)  # it makes float32 of observations


def test_sb3_learning(learner: Any):
    assert ecornn.torch.replace(learner.policy).swapped == ("lstm_actor", "lstm_critic")
    before = [w.detach().clone() for w in learner.policy.lstm_actor.parameters()]
    learner.learn(32)
    assert all(w.isfinite().all() and not torch.equal(w, was)
               for w, was in zip(learner.policy.lstm_actor.parameters(), before, strict=True))
    action, states = learner.predict(np.zeros((1, 4), np.float32), episode_start=np.ones(1))
    assert action.shape == (1,) and states[0].shape == (1, 1, 16)


def test_stanza_tokenizer(package: Any):
    module = package("stanza.models.tokenization.model")
    torch.manual_seed(0)
    options = {"feat_dim": 3, "rnn_layers": 2, "conv_res": "1,5", "use_mwt": True, "hierarchical": True,
               "tok_noise": 0.0, "hier_invtemp": 0.5}
    model = module.Tokenizer(options, 30, 8, 12, 0.3, 0.1).eval()
    letters, features, lengths = torch.randint(1, 30, (3, 9)), torch.randn(3, 9, 3), torch.tensor([9, 6, 2])
    check(model, lambda model, cast: model(letters, cast(features), lengths), ("rnn", "rnn2"))


def test_stanza_language(package: Any):
    module = package("stanza.models.langid.model")
    torch.manual_seed(0)
    letters = {"<PAD>": 0, "UNK": 1, **{c: n for n, c in enumerate("abcdefgh", 2)}}
    model = module.LangIDBiLSTM(letters, {"en": 0, "de": 1, "fr": 2}, 2, 8, 12).eval()
    x = torch.randint(1, 10, (4, 11))
    check(model, lambda model, cast: model(x), ("lstm",))


def test_stanza_packed_layers(package: Any):
    module = package("stanza.models.common.packed_lstm")
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"layer": module.PackedLSTM(7, 11, 2, batch_first=True, bidirectional=True, pad=True)})
    x, lengths = torch.randn(4, 6, 7), torch.tensor([6, 5, 5, 1])
    check(model, lambda model, cast: model["layer"](cast(x), lengths), ("layer.lstm",))


def test_stanza_lemmas(package: Any):
    module = package("stanza.models.common.seq2seq_model")
    torch.manual_seed(0)
    model = module.Seq2SeqModel({"vocab_size": 20, "emb_dim": 8, "hidden_dim": 16, "num_layers": 1, "dropout": 0.2,
                                 "max_dec_len": 10, "attn_type": "soft"}).eval()
    words, wanted = torch.randint(4, 20, (3, 6)), torch.randint(4, 20, (3, 5))
    padding = torch.arange(6)[None] >= torch.tensor([6, 4, 3])[:, None]
    words[padding] = 0
    check(model, lambda model, cast: model(words, padding, wanted)[0], ("encoder", "decoder.lstm_cell"))


EDGES = torch.tensor([[1, 2, 3, 0, 4, 2, 0, 1], [0, 0, 0, 1, 1, 2, 3, 4]])  # sorted by where they end


def test_geometric_graph_network(package: Any):
    nn = package("torch_geometric.nn")
    torch.manual_seed(0)
    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.SAGEConv(6, 10, aggr="lstm")
            self.second = nn.SAGEConv(10, 10, aggr=nn.aggr.GRUAggregation(10, 10))
            self.jump = nn.JumpingKnowledge("lstm", channels=10, num_layers=2)
            self.pool = nn.aggr.Set2Set(10, processing_steps=3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one = self.first(x, EDGES).relu()
            two = self.second(one, EDGES).relu()
            return self.pool(self.jump([one, two]), torch.tensor([0, 0, 0, 1, 1]), dim_size=2)

    x = torch.randn(5, 6)
    check(Network(), lambda model, cast: model(cast(x)), (
        "first.aggr_module.lstm", "second.aggr_module.gru", "jump.lstm", "pool.lstm"))
