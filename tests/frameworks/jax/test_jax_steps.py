"""`distribute`, `push_pull` and `broadcast` inside one process: types, devices, policies, and what is refused."""

from __future__ import annotations

import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import sparse

import syncline
import syncline.jax
from syncline import ConfigError, LayoutError, Rule, RuleError
from syncline.data import ArraySource, batches
from syncline.jax import packages
from syncline.testing import local_job
from syncline.worker.current import current_in_thread
from syncline.worker.job import Job


def trained(transform: Any, job: Job, num_steps: int = 4) -> Any:
    """Worker 0 has gradients of 1 and worker 1 of 3, with equal weights."""
    tx = syncline.jax.distribute(transform)
    params = {"a": jnp.full(2, 5.0 + job.rank), "b": {"c": jnp.zeros((), jnp.bfloat16)}}
    state = tx.init(params)
    params, state = tx.latest(params, state)
    for _ in range(num_steps):
        gradients = jax.tree.map(lambda leaf: jnp.full_like(leaf, 1 + 2 * job.rank), params)
        updates, state = tx.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    job.barrier("all")
    return tx.latest(params, state)[0]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 5 - 0.25 * 2 * 4),
        ({"exchange": "ring"}, 5 - 0.25 * 2 * 4),
        ({"sync_every": 2}, 5 - 0.25 * 2 * 4),
        ({"sync_every": 3}, 5 - 0.25 * 2 * 4),
        ({"policy": "async"}, 5 - 0.25 * 4 * 4),
        ({"policy": "bounded:1"}, 5 - 0.25 * 4 * 4),
        ({"policy": "async", "sync_every": 3}, 5 - 0.25 * 4 * 4),
    ],
)
def test_each_policy_adds_up_what_its_workers_change(settings: dict[str, Any], expected: float) -> None:
    """In rounds the mean counts; otherwise every change in full. Steps that are fewer than H count too."""
    with local_job(workers=2, **settings) as jobs:
        for params in jobs.run(lambda job: trained(optax.sgd(0.25), job)):
            assert params["a"].tolist() == pytest.approx([expected] * 2)
            assert params["b"]["c"].dtype == jnp.bfloat16


@pytest.mark.parametrize("settings", [{}, {"policy": "async"}])
def test_a_rule_runs_on_the_servers_and_its_options_can_change(settings: dict[str, Any]) -> None:
    def train(job: Job) -> list[float]:
        tx = syncline.jax.distribute(Rule("SGD", lr=1.0))
        params = {"a": jnp.zeros(1)}
        state, seen = tx.init(params), []
        for lr in (1.0, 10.0, 10.0):
            updates, state = tx.update({"a": -jnp.ones(1)}, state, params, lr=lr)
            params = optax.apply_updates(params, updates)
            seen.append(float(params["a"][0]))
        return seen

    with local_job(workers=1, **settings) as jobs:
        assert jobs.run(train) == [[1.0, 11.0, 21.0]]


def test_push_pull_is_the_weighted_mean_of_a_tree_and_keeps_its_types() -> None:
    def mean(job: Job) -> Any:
        tree = {"a": [jnp.full(2, 4.0 * job.rank)], "b": jnp.asarray(job.rank, jnp.bfloat16)}
        first = syncline.jax.push_pull(tree, weight=1 + 2 * job.rank)
        return first, syncline.jax.push_pull(tree)

    with local_job(workers=2) as jobs:
        for first, second in jobs.run(mean):
            assert first["a"][0].tolist() == [3.0, 3.0] and second["a"][0].tolist() == [2.0, 2.0]
            assert first["b"].dtype == jnp.bfloat16 and float(first["b"]) == 0.75


def test_broadcast_gives_the_chiefs_values_of_any_type() -> None:
    def first(job: Job) -> Any:
        tree = {"w": jnp.full(2, 1.0 + job.rank, jnp.float16), "key": jax.random.PRNGKey(job.rank), "n": 3 + job.rank}
        return syncline.jax.broadcast(tree)

    with local_job(workers=2) as jobs:
        for tree in jobs.run(first):
            assert tree["w"].tolist() == [1.0, 1.0] and tree["w"].dtype == jnp.float16
            assert tree["key"].tolist() == [0, 0] and tree["key"].dtype == jnp.uint32
            assert int(tree["n"]) == 3


@pytest.mark.parametrize("policy", ["async", "sync"])
def test_compiled_and_plain_steps_are_the_same(policy: str) -> None:
    """One worker; steps compiled with a donated state, of a model of flax where that is installed."""
    with local_job(workers=1, policy=policy) as jobs, current_in_thread(jobs[0]):
        found = []
        for compiles in (False, True):
            tx = syncline.jax.distribute(optax.adam(optax.linear_schedule(0.1, 0.0, 8)))
            params = {"params": {"Dense_0": {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}}}
            state = tx.init(params)

            def step(params: Any, state: Any, x: Any, tx: Any = tx) -> Any:
                dense = lambda p: x @ p["params"]["Dense_0"]["kernel"] + p["params"]["Dense_0"]["bias"]  # noqa: E731
                gradients = jax.grad(lambda p: (dense(p) ** 2).mean())(params)
                updates, state = tx.update(gradients, state, params)
                return optax.apply_updates(params, updates), state

            run = jax.jit(step, donate_argnums=(0, 1)) if compiles else step
            for k in range(6):
                params, state = run(params, state, jnp.arange(6.0).reshape(2, 3) + k)
            found.append(params["params"]["Dense_0"]["kernel"])
        np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
        assert not np.allclose(found[0], 1.0)
        assert "params.Dense_0.kernel" in jobs[0].exchange.layout.where


def test_a_train_state_of_flax_takes_the_transform() -> None:
    train_state = pytest.importorskip("flax.training.train_state")
    linen = pytest.importorskip("flax.linen")
    with local_job(workers=1) as jobs, current_in_thread(jobs[0]):
        model, x = linen.Dense(2), jnp.ones((4, 3))
        params = model.init(jax.random.key(0), x)
        tx = syncline.jax.distribute(optax.sgd(0.1))
        state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

        @jax.jit
        def step(state: Any) -> Any:
            loss = lambda p: (state.apply_fn(p, x) ** 2).mean()  # noqa: E731
            return state.apply_gradients(grads=jax.grad(loss)(state.params))

        losses = []
        for _ in range(5):
            losses.append(float((model.apply(state.params, x) ** 2).mean()))
            state = step(state)
        assert int(state.step) == 5 and losses[-1] < losses[0] / 2


def test_the_next_batch_waits_for_the_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commit acknowledges the samples of its own batch only, and its weight is their number. A GPU computes while
    the script goes on; a CPU does not, so what is seen here is that the loop waits for callbacks."""
    waits: list[int] = []
    barrier = jax.effects_barrier
    monkeypatch.setattr(jax, "effects_barrier", lambda: (barrier(), waits.append(jobs[0].own_step)))
    with local_job(workers=1) as jobs, current_in_thread(jobs[0]):
        job = jobs[0]
        tx = syncline.jax.distribute(optax.sgd(0.1))
        params = {"a": jnp.zeros(1)}
        state = tx.init(params)

        @jax.jit
        def step(params: Any, state: Any, x: Any) -> Any:
            updates, state = tx.update({"a": x.mean(keepdims=True)}, state, params)
            return optax.apply_updates(params, updates), state

        steps = []
        for (x,) in batches(ArraySource(np.arange(24, dtype=np.float32)), 4):
            steps.append(job.own_step)
            params, state = step(params, state, x)
        assert steps == [0, 1, 2, 3, 4, 5] and set(waits) == {0, 1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize("transform", [Rule("SGD", lr=0.1), optax.adam(0.1)], ids=["rule", "optax"])
def test_a_worker_that_is_asked_to_leave_ends_in_its_own_thread(transform: Any) -> None:
    """`SystemExit` cannot pass through compiled code: the loop raises it. A transform's state is pushed before."""
    with local_job(workers=1) as jobs, current_in_thread(jobs[0]):
        tx = syncline.jax.distribute(transform)
        params = {"a": jnp.zeros(1)}
        state = tx.init(params)
        step = jax.jit(lambda params, state: tx.update(params, state, params))
        with pytest.raises(SystemExit):
            for _ in batches(ArraySource(np.arange(8.0)), 4):
                jobs[0].retire()
                step(params, state)
        assert jobs[0].is_closed


# -- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["sync", "async"])
@pytest.mark.parametrize("transform", [optax.adam(0.1), Rule("Adam", lr=0.1)], ids=["transform", "rule"])
def test_an_optimizer_of_flax_nnx_takes_the_transform(transform: Any, policy: str) -> None:
    """It registers a tree of `nnx.Param`, and its steps give trees of plain arrays."""
    nnx = pytest.importorskip("flax.nnx")
    with local_job(workers=1, policy=policy) as jobs, current_in_thread(jobs[0]):
        model, x = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), jnp.ones((4, 3))
        tx = syncline.jax.distribute(transform)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model: Any, optimizer: Any) -> Any:
            loss, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
            optimizer.update(model, gradients)
            return loss

        losses = []
        for _ in range(4):
            losses += [float(step(model, optimizer)) for _ in range(2)]
            before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
            params, state = tx.latest(nnx.state(model, nnx.Param), optimizer.opt_state)
            nnx.update(model, params)
            optimizer.opt_state = nnx.data(state)
            after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
            jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6), before, after)
        assert losses[-1] < losses[0] / 2
        assert {"kernel", "bias"} <= set(jobs[0].exchange.layout.where)


def refused(words: str, kind: type[Exception] = LayoutError) -> Any:
    return pytest.raises(kind, match=words)


def test_trees_that_do_not_fit_are_named() -> None:
    with local_job(workers=1) as jobs, current_in_thread(jobs[0]):
        tx = syncline.jax.distribute(optax.sgd(0.1))
        params = {"a": jnp.ones(2), "b": jnp.ones(2)}
        with refused("call init", ConfigError):
            tx.update(params, (), params)
        state = tx.init(params)
        with refused("'b' is None in the gradients; give zeros"):
            tx.update({"a": jnp.ones(2), "b": None}, state, params)
        with refused("'b' is missing; call init again"):
            tx.update({"a": jnp.ones(2)}, state, params)
        with refused("'c' is new"):
            tx.update({**params, "c": jnp.ones(2)}, state, params)
        with refused(r"'a' is sparse \(BCOO\)"):
            tx.update({"a": sparse.BCOO.fromdense(jnp.ones(2)), "b": jnp.ones(2)}, state, params)
        with refused(re.escape("'a' as float32[3], the job has float32[2]")):
            tx.update({"a": jnp.ones(3), "b": jnp.ones(2)}, state, params)
        with refused("update.. needs the parameters", ConfigError):
            tx.update(params, state)
        with refused("outside jit", ConfigError):
            jax.jit(lambda p: tx.latest(p, state))(params)
        with refused("complex64; supported"):
            syncline.jax.distribute(optax.sgd(0.1)).init({"a": jnp.ones(2, jnp.complex64)})
        with refused("takes an optax transform or a syncline.Rule, not function", ConfigError):
            syncline.jax.distribute(optax.sgd)
        with refused(r"'a' is a key of jax\.random.*jax\.random\.PRNGKey\(0\)"):
            syncline.jax.distribute(optax.sgd(0.1)).init({"a": jax.random.key(0)})


def test_an_option_that_the_rule_does_not_have_is_named_by_a_compiled_step() -> None:
    """Not by the callback, whose errors come out as errors of JAX."""
    with local_job(workers=1) as jobs, current_in_thread(jobs[0]):
        tx, params = syncline.jax.distribute(Rule("Adam", lr=0.1)), {"a": jnp.ones(2)}
        state = tx.init(params)
        with refused("rule Adam has no option 'learning_rate'; it has: lr", RuleError):
            jax.jit(lambda p: tx.update(p, state, p, learning_rate=0.5))(params)


@pytest.mark.parametrize("transform", [optax.sgd(0.25), Rule("SGD", lr=0.25)], ids=["transform", "rule"])
def test_numbers_of_python_and_arrays_of_numpy_have_the_types_of_jax(transform: Any) -> None:
    """NumPy makes float64 of both, and gradients of them are float32."""
    with local_job(workers=1) as jobs, current_in_thread(jobs[0]):
        params = {"a": np.ones(2), "b": 1.0}
        tx = syncline.jax.distribute(transform)
        params, state = tx.latest(params, tx.init(params))
        updates, state = tx.update(jax.grad(lambda p: p["a"].sum() + p["b"])(params), state, params)
        params = optax.apply_updates(params, updates)
        assert (params["a"].dtype, params["a"].tolist(), float(params["b"])) == (jnp.float32, [0.75] * 2, 0.75)


def test_settings_that_do_not_fit_say_what_to_use() -> None:
    with local_job(workers=1, sync_every=2) as jobs, current_in_thread(jobs[0]):
        with refused("give an optax transform", ConfigError):
            syncline.jax.distribute(Rule("SGD", lr=0.1)).init({"a": jnp.ones(2)})
        with refused("--sync-every 2", ConfigError):
            syncline.jax.push_pull({"a": jnp.ones(2)})
    words = "needs rounds of all workers, and --policy async has none"
    with local_job(workers=1, policy="async") as jobs, current_in_thread(jobs[0]), refused(words, ConfigError):
        syncline.jax.push_pull({"a": jnp.ones(2)})


def test_an_old_or_missing_package_is_named_with_the_lowest_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version__", "0.4.30")
    with refused(r"jax 0.5.1 or newer; 0.4.30 is installed", ConfigError):
        packages.needed("jax")
    monkeypatch.setitem(sys.modules, "optax", None)
    with refused(r'syncline.jax.distribute needs optax: pip install "optax>=', ConfigError):
        syncline.jax.distribute(optax.sgd(0.1))


def test_arrays_on_several_devices_stay_there(commands: Any) -> None:
    """Of one process: compiled and not; bfloat16 beside float32."""
    script = """
        import os
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        import jax, jax.numpy as jnp, numpy as np, optax, syncline, syncline.jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        job = syncline.init()
        mesh = Mesh(np.array(jax.devices()), ("d",))
        split, whole = NamedSharding(mesh, PartitionSpec("d")), NamedSharding(mesh, PartitionSpec())
        for transform in (optax.sgd(0.5, momentum=0.5), syncline.Rule("SGD", lr=0.5, momentum=0.5)):
            a, b = jax.device_put(jnp.arange(4.0), split), jax.device_put(jnp.ones((), jnp.bfloat16), whole)
            params = {"a": a, "b": b}
            tx = syncline.jax.distribute(transform)
            params, state = tx.latest(params, tx.init(params))
            gradients = jax.tree.map(jnp.ones_like, params)

            def step(params, state):
                updates, state = tx.update(gradients, state, params)
                return optax.apply_updates(params, updates), state

            for run in (step, jax.jit(step)):
                params, state = run(params, state)
                assert params["a"].sharding == split and params["b"].dtype == jnp.bfloat16, params
            np.testing.assert_allclose(params["a"], np.arange(4.0) - 0.5 - 0.75)
            assert float(params["b"]) == -0.25
        job.close()
        print("WELL")
    """
    done = commands.finish(commands.start(program=(commands.script(script),)))
    assert done.code == 0 and "WELL" in done.output, done.output
