"""The server in a worker's process, in a ring: it starts with the worker and stays while the job needs it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from syncline import config as configuration
from syncline.core.ring import check_process_group_gpus, partner_of
from syncline.errors import ConfigError, JobFailed, SynclineError, WaitTimeout
from syncline.launch.hosts import local_place
from syncline.launch.jobfile import JobFile
from syncline.launch.restarts import LEFT
from syncline.net.device_channel import DeviceChannel

if TYPE_CHECKING:
    from syncline.launch.serving import End, Serving

#: The script computes in the same process, and other workers' servers on the same host.
MOST_THREADS = 2
#: How long to wait for the other scripts to end: then nothing needs to be handed over.
TOGETHER_SECONDS = 1.0
#: Pause before it asks to leave again: there may be no other server yet.
AGAIN_SECONDS = 0.5


class OwnServer:
    """A worker's own server; loads torch in `begin`, with the script's `init()`."""

    def __init__(self, file: JobFile, worker: str, host: str) -> None:
        """`worker`: its name, or "" for the next free one."""
        self._file, self._host = file, host
        self._name = partner_of(worker) if worker else ""
        self._serving: Serving | None = None
        self._refused: SynclineError | None = None
        self._on_refused: Callable[[], None] = lambda: None
        self.device_channel: DeviceChannel | None = None  # to the worker, on a GPU
        self._is_over = threading.Event()  # its part in the job is over
        self._is_finishing = False  # the script has ended

    # -- coming -------------------------------------------------------------------------------------------

    def begin(self, process: str, on_refused: Callable[[], None]) -> None:
        """Joins the job as the worker's partner. `on_refused`: called if that fails."""
        from syncline.launch.serving import Serving

        self._on_refused = on_refused
        num_threads = min(MOST_THREADS, configuration.num_threads())
        self.device_channel = self._open_device_channel()
        self._serving = Serving(
            self._file,
            self._name,
            self._hear,
            num_threads=num_threads,
            process=process,
            device_channel=self.device_channel,
        )
        self._serving.join(self._host)

    def _open_device_channel(self) -> DeviceChannel | None:
        """With `--sums nccl`: the channel to the worker on its GPU; an error if there is no GPU or no nccl."""
        config = configuration.resolve(self._file.given)
        if not config.has_process_group:
            return None
        try:
            import torch
            import torch.distributed
        except ImportError:
            raise ConfigError(f"--sums {config.sums} needs torch: pip install 'syncline[torch]'") from None
        has = {"gloo": torch.distributed.is_gloo_available, "nccl": torch.distributed.is_nccl_available}
        if not torch.distributed.is_available() or not has[config.sums]():
            raise ConfigError(f"--sums {config.sums}: this torch ({torch.__version__}) has none; use --sums ours")
        if config.sums != "nccl":
            return None
        place = local_place(config, partner_of(self._name) if self._name else "", self._host)
        device = config.device if ":" in config.device else f"cuda:{place}"
        check_process_group_gpus(config, place + 1, torch.cuda.device_count(), self._host)
        return DeviceChannel(device)

    def check(self) -> None:
        """Raises the error that kept it from joining, if any."""
        if self._refused is not None:
            raise self._refused

    def wait_until_in(self, seconds: float) -> None:
        """The worker is a member; waits until this server is, too."""
        assert self._serving is not None
        for _ in range(int(100 * seconds) + 1):
            self.check()
            if self._serving.is_in:
                return
            self._is_over.wait(0.01)
        raise WaitTimeout(f"{self._name or 'the server'} of this process was not in the job within {seconds:g} s")

    # -- going --------------------------------------------------------------------------------------------

    def _hear(self, end: End) -> None:
        """The job is over, or this server is out: so is its worker, which reports it. From any thread."""
        if end.error is not None:
            self._refused = end.error
            if not isinstance(end.error, JobFailed):  # the worker gets that itself, maybe with a better reason
                self._on_refused()
        if end.is_bug and not self._is_finishing:
            sys.stderr.write(f"syncline: {end.line}\n")
            sys.stdout.flush()
            os._exit(end.code)  # nothing that this process does counts any more
        self._is_over.set()

    def finish(self, code: int) -> int:
        """The script has ended: returns its exit code when the job is over, or when others have all slices.

        A script that failed ends its server at once.
        """
        self._is_finishing = True
        serving = self._serving
        if serving is None:
            return code
        if code in (0, LEFT) and not self._is_over.wait(TOGETHER_SECONDS):
            threading.Thread(target=self._leave, args=(serving,), name="retire", daemon=True).start()
            self._is_over.wait()
        serving.close()
        return code

    def _leave(self, serving: Serving) -> None:
        while not self._is_over.is_set():
            try:
                serving.leave()
                self._is_over.set()
            except SynclineError:  # it is the last server: the job ends with it, or another one joins
                self._is_over.wait(AGAIN_SECONDS)
