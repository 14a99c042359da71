"""sb3-contrib: recurrent policies, whose states start anew in the middle of a batch, and learning with one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from replaced import check

import ecornn.torch


@pytest.fixture
def learner(package: Any) -> Any:
    package("gymnasium")
    torch.manual_seed(0)
    return package("sb3_contrib").RecurrentPPO(
        "MlpLstmPolicy", "CartPole-v1", n_steps=16, batch_size=16, n_epochs=2, seed=0, device="cpu",
        policy_kwargs={"lstm_hidden_size": 16, "n_lstm_layers": 1})


@pytest.mark.parametrize("restarts", [False, True], ids=["one episode", "several"])
def test_evaluating_actions(learner: Any, restarts: bool):
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


def test_learning(learner: Any):
    """Collects steps of episodes and takes updates on them."""
    assert ecornn.torch.replace(learner.policy).swapped == ("lstm_actor", "lstm_critic")
    before = [w.detach().clone() for w in learner.policy.lstm_actor.parameters()]
    learner.learn(32)
    assert all(w.isfinite().all() and not torch.equal(w, was)
               for w, was in zip(learner.policy.lstm_actor.parameters(), before, strict=True))
    action, states = learner.predict(np.zeros((1, 4), np.float32), episode_start=np.ones(1))
    assert action.shape == (1,) and states[0].shape == (1, 1, 16)
