"""Several processes find each other, agree on who speaks, and none waits for one that is gone.

`torchrun` starts the processes and tells each its number; `join` makes them a group. Beside the
group's own connections they share a small store of texts, kept by torchrun or by rank 0. A thread
of each rank, the watch, looks into it several times a second, because a process that waits for
another in the middle of a sum can look at nothing itself:

  an error on one rank     its rank claims the word and prints; the others end at once, silently
  a rank that was killed   its beat stops; whoever notices first names it
  a signal from torchrun   which sends it to the rest when one process has ended
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llamatool.errors import LostRankError, ResourceError, UsageError

JOIN_SECONDS = 300.0  # to wait for every rank to come
POLL_SECONDS = 0.2  # between two looks into the store
SILENT_SECONDS = 60.0  # after which a rank without a beat counts as gone
BEAT_SECONDS = 5.0  # between two looks at the beats of all
GRACE_SECONDS = 1.0  # that other ranks leave to rank 0, to say first what all have found
ABORT_EXIT = 4


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launcher told this process."""

    rank: int
    size: int
    local_rank: int  # among the processes of this machine
    local_size: int
    address: str  # of rank 0's machine
    port: int
    hosts_store: bool  # False where the launcher keeps the store itself
    name: str  # of the run, so that a restart does not read what the first try wrote
    join_seconds: float = JOIN_SECONDS


@dataclass(slots=True)
class Crew:
    """The processes of a run, as one of them sees them."""

    launch: Launch
    device: torch.device
    mesh: DeviceMesh
    store: Store
    watch: "Watch"
    _told: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which reads input and writes output."""
        return self.launch.rank == 0

    def tell(self, make: Callable[[], str]) -> str:
        """What `make` gives on rank 0, on every rank. The others wait as long as it takes."""
        key = f"told/{self._told}"
        self._told += 1
        if self.is_first:
            text = make()
            self.store.set(key, text)
            return text
        while not self.store.check([key]):
            time.sleep(POLL_SECONDS / 10)
        return str(self.store.get(key).decode())

    def claim(self, exit_code: int) -> bool:
        """Whether this rank is the one to say why the run ends; the others then end, too."""
        if not self.is_first:
            time.sleep(GRACE_SECONDS)
        return self.watch.claim(exit_code)

    def missing(self) -> list[int]:
        """Ranks that have stopped to show signs of life."""
        return self.watch.missing()

    def leave(self, *, in_order: bool) -> None:
        """Ends the group; in order, when all ranks have come here."""
        if in_order:
            with suppress(RuntimeError):
                dist.barrier(group=self.mesh.get_group())
        else:
            self.watch.let_others_go()
        self.watch.stop()
        # An open group ends the process with an abort.
        with suppress(RuntimeError, ValueError):
            if in_order:
                dist.destroy_process_group()


def join(launch: Launch, device: str) -> Crew:
    """The group of all processes of this run, once every one of them is here.

    Args: device: `auto`, `cpu` or `cuda`; on GPUs each rank takes the one of its local number.
    Raises: UsageError for a device that ranks cannot share; ResourceError if there are fewer GPUs
    than ranks, or the port is taken; LostRankError naming the ranks that did not come in time;
    EndedElsewhere if another rank says so.
    """
    place = _device(launch, device)
    deadline = time.monotonic() + launch.join_seconds
    store = _open_store(launch)
    _gather(store, launch, deadline)
    seconds = timedelta(minutes=30)  # of one exchange: loading may take longer on one rank
    dist.init_process_group(
        "nccl" if place.type == "cuda" else "gloo",
        store=PrefixStore("group", store),
        rank=launch.rank,
        world_size=launch.size,
        timeout=seconds,
    )
    mesh = init_device_mesh(place.type, (launch.size,))
    watch = Watch(launch)
    watch.start()
    return Crew(launch, place, mesh, store, watch)


def _device(launch: Launch, name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise UsageError(
            f"--device {name[:80]} cannot be shared by {launch.size} ranks",
            hint="each rank takes a GPU of its own with --device cuda, or a part of the CPU",
        )
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available() or launch.local_rank >= torch.cuda.device_count():
        raise ResourceError(
            f"rank {launch.rank} needs GPU {launch.local_rank}, and"
            f" {torch.cuda.device_count()} are here",
            hint="start as many ranks as there are GPUs: torchrun --nproc-per-node",
        )
    torch.cuda.set_device(launch.local_rank)
    return torch.device("cuda", launch.local_rank)


def _open_store(launch: Launch) -> Store:
    """The texts that all ranks see.

    Raises: ResourceError if the port is taken; LostRankError if nobody keeps the store in time.
    """
    try:
        store = TCPStore(
            launch.address,
            launch.port,
            None,
            launch.hosts_store and launch.rank == 0,
            timedelta(seconds=launch.join_seconds),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        where = f"{launch.address}:{launch.port}"
        if "in use" in str(error).lower() or "EADDRINUSE" in str(error):
            raise ResourceError(
                f"port {launch.port} is taken by another program",
                where=where,
                hint="choose another one: torchrun --master-port, or MASTER_PORT",
            ) from None
        raise LostRankError(
            f"rank {launch.rank} of {launch.size} found no rank 0 within {launch.join_seconds:g} s",
            where=where,
            hint="is it running, and can this machine reach that address and port?",
        ) from None
    return PrefixStore(launch.name, store)


class EndedElsewhere(Exception):  # noqa: N818  # no error of this rank
    """The run has ended before it began, and another rank has said why."""


def _gather(store: Store, launch: Launch, deadline: float) -> None:
    """Waits until every rank is here.

    Raises: LostRankError naming those that are not, on the first rank that is here;
    EndedElsewhere on the others.
    """
    try:
        store.set(f"here/{launch.rank}", "")
        while missing := [r for r in range(launch.size) if not store.check([f"here/{r}"])]:
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS / 4)
        if not missing:
            return
        first = next(rank for rank in range(launch.size) if rank not in missing)
        if launch.rank == 0:
            time.sleep(2 * GRACE_SECONDS)  # the others still look into the store it keeps
    except RuntimeError:  # rank 0 has left, and taken the store with it
        raise EndedElsewhere from None
    if launch.rank != first:
        raise EndedElsewhere
    raise LostRankError(
        f"{_names(missing)} of {launch.size} did not come within {launch.join_seconds:g} s",
        hint="start every rank with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE",
    )


class Watch:
    """The thread of a rank that sees what its main thread, busy or waiting, cannot see."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        # A connection of its own: one that waits for an answer lets no other question through.
        client = TCPStore(
            launch.address, launch.port, None, False, timedelta(seconds=10), wait_for_workers=False
        )
        self._store = PrefixStore(launch.name, client)
        self._lock = threading.Lock()  # a store answers one thread at a time
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._read, self._write = os.pipe()
        self._claimed = False
        self._heard: dict[int, tuple[int, float]] = {}  # beats of a rank, and since when so many
        self.interrupted = False
        self.say: Callable[[str], None] = lambda message: None

    def start(self) -> None:
        """Begins to look, and takes the signals that end a process over from Python."""
        os.set_blocking(self._write, False)
        signal.signal(signal.SIGTERM, lambda number, frame: None)  # the thread acts on it
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread.start()

    def stop(self) -> None:
        """Looks no longer."""
        self._ended.set()
        with suppress(OSError):
            os.write(self._write, b"\0")
        self._thread.join(timeout=5 * POLL_SECONDS)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def claim(self, exit_code: int) -> bool:
        """Whether nobody has claimed the last word before."""
        mine = f"{self._launch.rank} {exit_code}"
        with self._lock:
            if self._claimed:
                return False
            try:
                self._claimed = self._store.compare_set("last", "", mine).decode() == mine
            except RuntimeError:  # rank 0 is gone and its store with it
                self._claimed = self._launch.rank == 1
            return self._claimed

    def missing(self) -> list[int]:
        """Ranks whose beat has stopped."""
        before = self._beats()
        time.sleep(5 * POLL_SECONDS)
        after = self._beats()
        if before is None or after is None:  # rank 0 kept the store
            return [0] if self._launch.hosts_store else []
        return [rank for rank in before if before[rank] == after.get(rank)]

    def let_others_go(self) -> None:
        """Keeps the store until the other ranks have seen that the run has ended."""
        if self._launch.rank or not self._launch.hosts_store:
            return
        deadline = time.monotonic() + 10 * POLL_SECONDS
        others = range(1, self._launch.size)
        while time.monotonic() < deadline:
            with suppress(RuntimeError), self._lock:
                if all(self._store.check([f"gone/{rank}"]) for rank in others):
                    return
            time.sleep(POLL_SECONDS / 2)

    def _beats(self) -> dict[int, int] | None:
        """Of the ranks that have not said farewell; None if the store is gone."""
        beats: dict[int, int] = {}
        try:
            with self._lock:
                for rank in range(self._launch.size):
                    if rank != self._launch.rank and not self._store.check([f"gone/{rank}"]):
                        beats[rank] = self._store.add(f"beat/{rank}", 0)
        except RuntimeError:
            return None
        return beats

    def _run(self) -> None:
        listened = time.monotonic()
        while not self._ended.is_set():
            signals = self._signals()
            if self._ended.is_set():
                return
            if signal.SIGINT in signals:
                self.interrupted = True
            if signal.SIGTERM in signals:
                self._stopped()
            try:
                with self._lock:
                    self._store.add(f"beat/{self._launch.rank}", 1)
                    last = self._store.get("last") if self._store.check(["last"]) else b""
            except RuntimeError:
                self._store_lost()
                return
            speaker, _, code = last.decode().partition(" ")
            if speaker and int(speaker) != self._launch.rank:
                self._end(int(code))
            if not speaker and time.monotonic() > listened + BEAT_SECONDS:
                listened = time.monotonic()
                self._listen(listened)

    def _listen(self, now: float) -> None:
        """Ends the run if a rank has been silent too long, however it was lost."""
        for rank, beats in (self._beats() or {}).items():
            if self._heard.get(rank, (-1, now))[0] != beats:
                self._heard[rank] = beats, now
        lost = [rank for rank, (_, since) in self._heard.items() if now > since + SILENT_SECONDS]
        if lost and self.claim(ABORT_EXIT):
            self.say(_gone(lost))
            self._end(ABORT_EXIT)

    def _signals(self) -> bytes:
        """The numbers of signals that came, within one interval."""
        ready, _, _ = select.select([self._read], [], [], POLL_SECONDS)
        return os.read(self._read, 64) if ready else b""

    def _stopped(self) -> None:
        """By torchrun, as a rule because another rank has ended; that rank may still speak."""
        if self.interrupted:
            self._end(130)
        lost = self.missing()
        if self._ended.is_set():
            return
        if self._claimed:  # the main thread has noticed, and says so
            return
        if self.claim(ABORT_EXIT):
            self.say(_gone(lost) if lost else "error: stopped by a signal (SIGTERM)")
        self._end(ABORT_EXIT)

    def _store_lost(self) -> None:
        """Nothing is left to ask: whoever kept the store has ended."""
        if self._ended.wait(2 * GRACE_SECONDS):
            return
        if self._launch.hosts_store and self._launch.rank == 1 and not self.interrupted:
            self.say(_gone([0]))
        self._end(130 if self.interrupted else ABORT_EXIT)

    def _end(self, code: int) -> None:
        if self._ended.is_set():
            return
        with suppress(RuntimeError), self._lock:
            self._store.set(f"gone/{self._launch.rank}", "")
        self.let_others_go()
        os._exit(code)


def _names(ranks: list[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def _gone(ranks: list[int]) -> str:
    return (
        f"error: {_names(ranks)} of this run ended without a word (killed, or out of memory)\n"
        "hint: look at that machine's system log; `llamatool kv-budget` shows what a rank needs"
    )
