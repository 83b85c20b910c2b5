"""`DistributedOptimizer`: the user's own optimizer, with its rule on the servers."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from syncline.core.layout import Ranges, Segment
from syncline.core.policy import policy_of
from syncline.core.rule import Option, Rule
from syncline.errors import ConfigError, LayoutError, ProtocolError
from syncline.net.device_channel import WorkerChannel
from syncline.net.memory import aligned_zeros
from syncline.torch.batch_sizes import BatchSizes
from syncline.torch.buffers import Buffers
from syncline.torch.carriers import ArenaCarrier, Carrier, MirrorCarrier
from syncline.torch.channel_carrier import ChannelCarrier
from syncline.torch.device_receiver import DeviceReceiver
from syncline.torch.gradients import Gradients
from syncline.torch.local_steps import LocalSteps
from syncline.torch.notices import Notices
from syncline.torch.parameters import Tracked, free_prefix, name_parameters, on_cpu, others
from syncline.torch.peer_channel import PeerChannel, why_not
from syncline.torch.pipelining.pipeline import Pipeline, check_is_pipeline
from syncline.torch.receiver import HostReceiver, ParameterReceiver
from syncline.torch.remembered import Remembered
from syncline.torch.rules import ChangedOptions, group_rule, rule_name
from syncline.torch.schedulers import Schedulers
from syncline.torch.state import load_state, read_average, read_state
from syncline.torch.streams import Side, open_side
from syncline.torch.validation import take_part_in
from syncline.worker.checkpoint.script_state import Part
from syncline.worker.current import current_job
from syncline.worker.exchange.commit import Push
from syncline.worker.job import Job
from syncline.worker.metrics import with_factor
from syncline.worker.nominal import NominalWeight

#: Steps between two checks whether a script has written to parameters, with several workers.
LOOK_STEPS = 32


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps a `torch.optim` optimizer: `step()` pushes this worker's gradients and lands new parameters.

    With `model`, its names and buffers are used: buffers are the chief's after every step (`buffers="chief"`) or
    the workers' mean (`"mean"`). `clip_norm` clips the round's mean gradient by its global norm. `overlap` sends
    gradients while backward goes on, over sockets and from a GPU, and has a ring add them up. On a GPU `step()` then
    returns before the new parameters are there: each is awaited where its module's code reads it. Who reads them
    elsewhere (from a list kept from before, say) calls `wait()` first.
    """

    _step_supports_amp_scaling = True
    is_saved_by_job = True  #: so it need not be in `job.state`

    def __init__(
        self,
        opt: torch.optim.Optimizer,
        *,
        model: torch.nn.Module | None = None,
        job: Job | None = None,
        overlap: bool = True,
        clip_norm: float | None = None,
        buffers: str = "chief",
    ) -> None:
        self._check(opt, clip_norm, buffers)
        self._opt, self._model, self._overlap, self._clip_norm = opt, model, overlap, clip_norm
        self._registered = self._has_pushed = False
        self._uses_data = False  # the script writes through `.data`, which is detected by sampling only
        self._schedule: Callable[[Job, list[dict[str, Any]]], None] | None = None
        super().__init__(opt.param_groups, opt.defaults)
        self._share_state()
        self._job = job or current_job()
        check_is_pipeline(model, self._job)
        policy = policy_of(self._job.config)
        self._in_rounds = policy.in_rounds
        self._taken = self._job.samples_taken  # at the last step
        self._nominal = NominalWeight(self._job)
        named = list(name_parameters(self.param_groups, model))
        self._prefix = free_prefix(self._job.names_taken, named, shares=not self._is_as_in_torch(named))
        self._tracked: list[Tracked] = list(name_parameters(self.param_groups, model, self._prefix))
        self._watched: list[tuple[int, int, int, ChangedOptions]] = []  # segment, its rule, our group
        self._gradients: list[Gradients] = []
        self._notices = Notices(self._job, self._in_rounds)
        self._batch_sizes = BatchSizes(self._job, model, in_rounds=self._in_rounds)
        self._local = LocalSteps(self._job, opt, self._prefix) if self._job.config.steps_locally else None
        self._sides = self._open_sides()
        self._device_channel = self._find_device_channel()
        #: The first values come where parameters stay: a pipeline's model may be too large to be here twice.
        self._pulls_into_place = isinstance(model, Pipeline)
        self._rule = self._local.rule.name if self._local else rule_name(opt)
        self._notices.at_start(model)
        with model.naming_lack_of_memory() if isinstance(model, Pipeline) else contextlib.nullcontext():
            self._register_groups(0)
        self._buffers = Buffers(self._job, model, buffers, self._prefix) if model is not None else None
        self._register_others()
        self._receiver = self._make_receiver()
        self._notices.mind_changes(self._tracked)
        self._job.before_settle(_as_long_as_alive(self, DistributedOptimizer._settle))
        self._since_pull = 0  # with --pull-every: pushes since the last new parameters
        if self._job.config.pull_every > 1:
            self._job.before_settle(_as_long_as_alive(self, DistributedOptimizer._catch_up))
        if self._local is None or not self._in_rounds:  # in rounds local values are its own until the next average
            self._job.after_wait(_as_long_as_alive(self, DistributedOptimizer.pull))
        self._registered = True
        self._remember()
        take_part_in(self._job.validation, self, model)

    def _is_as_in_torch(self, items: Sequence[Tracked]) -> bool:
        """Whether this optimizer has its own state even if another one has the same parameters. In an embedded job
        it does: there each uploads the values that it finds. (Not on a GPU, nor with local steps.)
        """
        is_plain = self._job.is_embedded and not self._job.config.steps_locally
        return is_plain and all(item.tensor.device.type == "cpu" for item in items)

    def _remember(self) -> None:
        """Saves the groups' options with the script's state; with local steps the whole optimizer state."""
        alone = self._job.is_embedded
        schedulers = Schedulers((self, self._opt), self._job.notice, holds=not alone)
        self._remembered = Remembered(self._opt, schedulers, self._job.notice, with_state=self._local is not None)
        self._look_for_schedulers: Callable[[], None] | None = schedulers.look if not alone else None
        alive, state = weakref.ref(self), self._job.state
        take = lambda: own._remembered.take() if (own := alive()) is not None else None  # noqa: E731

        def put_back(saved: Any) -> None:
            if (own := alive()) is not None:
                state.num_loaded += own._remembered.put_back(saved)
                own._share_state()

        self._job.state.add_part(f"optimizer {self._prefix or 'model1.'}", Part(take, put_back))
        self._job.tells_rates(lambda: own._rates() if (own := alive()) is not None else {})

    @staticmethod
    def _check(opt: torch.optim.Optimizer, clip_norm: float | None, buffers: str) -> None:
        if not isinstance(opt, torch.optim.Optimizer) or isinstance(opt, DistributedOptimizer):
            raise ConfigError(f"DistributedOptimizer takes a torch.optim optimizer, not {type(opt).__name__}")
        if clip_norm is not None and not (math.isfinite(clip_norm) and clip_norm > 0):
            raise ConfigError(f"clip_norm = {clip_norm}: it must be more than 0")
        if buffers not in ("chief", "mean"):
            raise ConfigError(f"buffers = {buffers!r}: must be one of chief, mean")

    def _share_state(self) -> None:
        """Wrapper and wrapped optimizer share groups and state."""
        self.param_groups, self.state = self._opt.param_groups, self._opt.state

    # -- registering --------------------------------------------------------------------------------------

    def _register_groups(self, first: int) -> None:
        """Registers the parameters of the groups from `first` on: one segment, a rule per group."""
        items = [item for item in self._tracked if item.group >= first]
        if not items:
            raise LayoutError("the optimizer has no parameters")
        groups = range(first, len(self.param_groups))
        rules = {index: self._group_rule(index) for index in groups}
        named = [(item.name, on_cpu(item.tensor)) for item in items]
        by_name = {item.name: rules[item.group] for item in items}
        if self._pulls_into_place and not first:
            self._job.kv.declare(named, by_name)
        else:
            _take(items, self._job.kv.register(named, by_name))
        segment = self._job.exchange.layout.where[items[0].name][0]
        self._watch_options(segment, first)
        overlap, carrier = self._overlap and self._local is None, self._carrier(segment, items)
        if isinstance(self._model, Pipeline):
            overlap = False  # no gradient is complete before the last micro-batch
            self._share_arena(self._model, carrier, segment)
        self._gradients.append(Gradients(carrier, segment, items, overlap))
        self._notices.watch(items, self._model)

    def _share_arena(self, pipe: Pipeline, carrier: Carrier, segment: Segment) -> None:
        """Stage processes compute gradients where servers read them, so that no one copies them. With --pull-every a
        server may still read those of the step before.
        """
        is_free = self._job.exchange.num_slots == 1 and self._job.config.pull_every == 1
        if isinstance(carrier, ArenaCarrier) and is_free and pipe.has_stages:
            places = {parameter.name: at for parameter, at in zip(segment.parameters, segment.offsets, strict=True)}
            tensors = {i.tensor: places[i.name] for i in self._tracked if i.name in places}
            pipe.keep_gradients(carrier.share(), tensors)

    def _open_sides(self) -> tuple[Side, Side] | None:
        """Side streams from and to the one device with all parameters, if it has any."""
        devices = {item.tensor.device for item in self._tracked}
        if self._local is not None or len(devices) != 1:
            return None
        out, into = (open_side(next(iter(devices)), self._job.notice) for _ in range(2))
        return (out, into) if out is not None and into is not None else None

    def _find_device_channel(self) -> WorkerChannel | None:
        """The channel to servers whose slices are on the one device of all parameters: to that of this process, or,
        with `--server-device cuda`, to those on this host.
        """
        routes, config = self._job.exchange.routes, self._job.config
        if self._sides is None:
            return None
        device = self._tracked[0].tensor.device
        if routes.device_channel is None and config.server_device != "cpu":
            if reason := why_not(config, is_embedded=self._job.is_embedded):
                self._job.notice(f"gradients and parameters go through host memory: {reason}")
                return None
            routes.device_channel = PeerChannel(self._job.exchange, device, self._job.notice)
        found = routes.device_channel
        return found if found is not None and torch.device(found.device) == device else None

    def _carrier(self, segment: Segment, items: Sequence[Tracked]) -> Carrier:
        if self._sides is None:
            return ArenaCarrier(self._job.exchange, segment)
        if self._device_channel is not None and self._device_channel.open_for(segment):
            return ChannelCarrier(self._job.exchange, segment, items[0].tensor.device, self._device_channel)
        return MirrorCarrier(self._job.exchange, segment, items[0].tensor.device, self._sides[0])

    def _group_rule(self, index: int) -> Rule:
        return self._local.rule if self._local else group_rule(self._rule, self.param_groups[index])

    def _register_others(self) -> None:
        """Registers parameters that no optimizer updates: all workers take the chief's values once."""
        rest = others(self._model, self._tracked, self._prefix) if self._model is not None else []
        if rest:
            _take(rest, self._job.kv.register([(i.name, on_cpu(i.tensor)) for i in rest], Rule("Assign")))

    def _make_receiver(self) -> ParameterReceiver:
        window, exchange = self._job.config.window, self._job.exchange
        if self._sides is not None:
            if self._overlap and self._model is not None:
                self._job.notice(
                    "parameters arrive in the background, and each module waits for its own; if you read parameters "
                    "elsewhere, for example from a list, call wait() first, or pass overlap=False"
                )
            return DeviceReceiver(
                exchange,
                self._tracked,
                self._buffers,
                window,
                side=self._sides[1],
                model=self._model,
                lazy=self._overlap,
                device_channel=self._device_channel,
            )
        also = self._local.interval.flats if self._local is not None else {}
        create = self._model.create_memory if isinstance(self._model, Pipeline) else aligned_zeros
        receiver = HostReceiver(
            exchange, self._tracked, self._buffers, window, also, in_place=self._local is None, create=create
        )
        if self._pulls_into_place and not self._registered:
            receiver.pull()
        if self._local is not None:
            self._local.begin(self._tracked, receiver.flat, self._synchronise)
        return receiver

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch has it; after construction, the new parameters join the job too."""
        if not getattr(self, "_registered", False):
            super().add_param_group(param_group)
            return
        self._settle()
        if self._local is not None:
            self._local.flush()
        first = len(self.param_groups)
        self._opt.add_param_group(param_group)
        self._share_state()
        fresh = [i for i in name_parameters(self.param_groups, self._model, self._prefix) if i.group >= first]
        self._tracked += fresh
        self._register_groups(first)
        self._receiver.close()
        self._receiver = self._make_receiver()
        self._notices.mind_changes(self._tracked)
        self._remembered.look()

    # -- stepping -----------------------------------------------------------------------------------------

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, weight: float | None = None
    ) -> float | None:
        """Pushes the gradients and lands new parameters.

        `weight` is this worker's share in the round's mean: by default the samples that our DataLoader has handed
        out since the last step, else 1. With a loader of your own, give the number of samples in the step's batches.
        """
        self._job.commits(id(self))
        if not self._job.checkpoints.resume.is_over:
            self._job.checkpoints.resume.begins_step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._schedule is not None:
            self._schedule(self._job, self.param_groups)
        self._receiver.before_push()
        taken, self._taken = self._job.samples_taken - self._taken, self._job.samples_taken
        self._batch_sizes.at_step(is_weighted=weight is not None, num_taken=taken)
        weight = float(max(taken, 0) or 1) if weight is None else float(weight)
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"weight = {weight}: it must be a number from 0 on")
        scale, overflow = self._scaling()
        if self._job.life.number > 1 and self._schedule is None:  # otherwise they follow the progress of the run
            self._job.uses_rates(self._rates())
        if self._local is not None:
            self._local.step(weight, scale, overflow, self._clip_norm, closure)
        else:
            self._push(weight, scale, overflow)
            self._job.stepped()
        if self._look_for_schedulers is not None:  # once: scripts make them before their first step
            self._look_for_schedulers()
            self._look_for_schedulers = None
        self._job.leave_if_asked()
        return loss

    def follow(self, schedule: Callable[[Job, list[dict[str, Any]]], None]) -> None:
        """From now on this sets the learning rates of the groups at every step: see `syncline.torch.schedule`."""
        self._schedule = schedule

    def _rates(self) -> dict[str, Any]:
        return {f"{self._prefix}{n}": group["lr"] for n, group in enumerate(self.param_groups) if "lr" in group}

    def _scaling(self) -> tuple[torch.Tensor | None, bool]:
        """A GradScaler's factor that unscales the gradients, and whether they overflowed."""
        grad_scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        overflow = found_inf is not None and bool(found_inf)
        return (None if grad_scale is None else 1.0 / grad_scale), overflow

    @torch.no_grad()
    def _push(self, weight: float, scale: torch.Tensor | None, overflow: bool) -> None:
        """Collects gradients into the arena and commits them. On a CPU, returns with the new parameters."""
        pushed: Ranges = ()
        clip = self._clip_norm
        self._job.exchange.times.lap("compute")
        if not overflow:
            self._notices.before_push()
            if self._have_changed():
                self._keep_changes()
            self._has_pushed = True
            if clip is not None and not self._in_rounds:
                # Without rounds there is no mean: the push is clipped here, by its own norm.
                scale, clip = self._own_clip(clip, scale), None
            for gradients in self._gradients:
                pushed += gradients.collect(scale)
        else:
            for gradients in self._gradients:
                gradients.drop()
        if self._buffers is not None and not overflow:
            pushed += self._buffers.collect()
        push = Push(
            pushed=tuple(sorted(pushed)),
            weight=weight,
            nominal=self._nominal.of(weight, self._job.samples.batch_size),
            skip=overflow,
            clip_norm=clip,
            overrides=self._overrides(),
            as_staged=frozenset().union(*(g.as_staged for g in self._gradients)) if not overflow else frozenset(),
            finite=tuple(sorted(ids for g in self._gradients for ids in g.finite)) if not overflow else (),
        )
        self._since_pull += 1
        if self._since_pull < self._job.config.pull_every:
            self._receiver.opened(self._job.exchange.commit(push, None))
            return
        self._since_pull = 0
        self._receiver.before_commit()
        self._receiver.opened(self._job.exchange.commit(push, self._receiver.target))

    def _minds_changes(self) -> bool:
        """Whether to check for writes now. With several workers they are only reported, once, so checks are rare."""
        if self._job.is_embedded or not self._has_pushed:
            return True
        return not self._notices.has_told_change and self._job.own_step % LOOK_STEPS == 0

    def _have_changed(self) -> bool:
        """Whether the script has written to parameters since the last step, or replaced their memory."""
        if self._local is not None or not self._minds_changes():
            return False
        has_changed, is_written = self._notices.have_changed(), self._receiver.is_written
        self._uses_data |= is_written and not has_changed
        is_left = self._job.is_embedded and self._receiver.is_left
        return has_changed or is_written or self._uses_data or is_left

    def _keep_changes(self) -> None:
        """Handles writes to parameters. The script's values count before the first step, and in an embedded job.
        Otherwise other workers update the same parameters, and the user is told.
        """
        assert isinstance(self._receiver, HostReceiver)
        exchange, is_alone = self._job.exchange, self._job.is_embedded
        if not self._job.is_chief:
            return
        is_first = self._in_rounds and not self._has_pushed and not self._job.config.is_ring
        try:
            if is_alone or is_first:
                self._receiver.flat.gather()
                for index, values in self._receiver.flat.flats.items():
                    exchange.upload(exchange.layout.segments[index], values, again=is_alone)
                return
        except ProtocolError:
            pass  # the job has made steps before
        if self._receiver.is_written:  # otherwise they were swapped for an evaluation and restored
            self._notices.tell_change()

    def _own_clip(self, clip: float, scale: torch.Tensor | None) -> torch.Tensor:
        norms = torch.stack([gradients.norm() for gradients in self._gradients])
        factor = torch.ones(()) if scale is None else scale.to("cpu").reshape(())
        norm = torch.linalg.vector_norm(norms.to("cpu")) * factor
        return torch.clamp(clip / (norm + 1e-6), max=1.0) * factor

    def _overrides(self) -> Sequence[tuple[int, int, Mapping[str, Option]]]:
        """Hyperparameters that differ from the registered ones. In a round those of one worker count: the chief's
        if it takes part, else the most senior one's.
        """
        found, factor = [], self._job.lr_factor
        for segment, group, index, options in self._watched:
            if changed := with_factor(options.of(self.param_groups[index]), options.registered, factor):
                found.append((segment, group, changed))
        return found

    def _watch_options(self, segment: Segment, first: int) -> None:
        """Watches the options of the groups from `first` on, each registered with a rule of this segment."""
        for index in range(first, len(self.param_groups)):
            item = next(item for item in self._tracked if item.group == index)
            group = segment.parameters[self._job.exchange.layout.where[item.name][1]].group
            options = ChangedOptions(self._rule, segment.rules[group].options)
            self._watched.append((segment.index, group, index, options))

    def wait(self) -> None:
        """Returns when the new parameters may be read anywhere: on a GPU, by what is queued from now on."""
        self._receiver.wait()

    def _settle(self) -> None:
        self._receiver.settle()

    def _synchronise(self, weight: float, pushed: Ranges) -> None:
        """For local steps: pushes the deltas in the arena; new parameters are received into the flat memory."""
        if self._buffers is not None:
            pushed += self._buffers.collect()
        # The delta of short batches is small by itself: it counts in full.
        push = Push(pushed=tuple(sorted(pushed)), weight=weight, nominal=weight or 1.0)
        self._receiver.opened(self._job.exchange.commit(push, self._receiver.target))
        self._receiver.settle()

    @torch.no_grad()
    def pull(self) -> None:
        """Brings the newest parameters into the model: after training, or by a worker that has rested."""
        self._settle()
        if self._local is not None:
            self._local.flush()
        self._receiver.pull()
        self._since_pull = 0

    def _catch_up(self) -> None:
        """At a rest, a barrier and the end: takes the new parameters that --pull-every has left out."""
        if self._since_pull:
            self.pull()

    def read_average(self) -> dict[torch.Tensor, torch.Tensor]:
        """The servers' running averages (`--average ema:D`) by parameter, if there are any."""
        self._settle()
        return read_average(self._job.exchange, self._tracked)

    def named(self) -> dict[str, torch.Tensor]:
        """The updated parameters by their names in the job."""
        return {item.name: item.tensor for item in self._tracked}

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients only accumulate, as in DistributedDataParallel; the next backward outside of it sends them."""
        for gradients in self._gradients:
            gradients.pause(True)
        try:
            yield
        finally:
            for gradients in self._gradients:
                gradients.pause(False)

    # -- state --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch has it. The state is pulled from the servers by this worker alone."""
        self._settle()
        if self._local is None:
            self._opt.state.update(read_state(self._job.exchange, self._tracked))
        try:
            return self._opt.state_dict()
        finally:
            if self._local is None:
                self._opt.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch has it. The chief's state counts; groups and their hyperparameters are each worker's."""
        self._settle()
        self._opt.load_state_dict(state_dict)
        self._share_state()
        if self._local is None:
            if self._job.is_chief:
                load_state(self._job.exchange, self._tracked, self._opt.state)
            self._opt.state.clear()

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._opt!r})"


@torch.no_grad()
def _take(items: Sequence[Tracked], values: dict[str, Any]) -> None:
    for item in items:
        item.tensor.copy_(values[item.name])


def _as_long_as_alive(
    optimizer: DistributedOptimizer, action: Callable[[DistributedOptimizer], None]
) -> Callable[[], None]:
    """Calls an action on an optimizer while it lives; the job does not keep it alive."""
    found = weakref.ref(optimizer)

    def act() -> None:
        alive = found()
        if alive is not None:
            action(alive)

    return act
