"""Several processes find each other, agree on who speaks, and none waits for one that is gone.

`torchrun` starts the processes and tells each its number; `meet` brings them together, `form`
makes them a group. Beside the group's own connections they share a small store of texts, kept by
torchrun or by rank 0. Two threads of each rank, the watch, look into it several times a second,
because a process that waits for another in the middle of a sum can look at nothing itself:

  an error on one rank     its rank claims the word and prints; the others end at once, silently
  a rank that was killed   its beat stops; whoever notices first names it
  a store that is silent   counts as lost with the rank that keeps it
  a signal from torchrun   which sends it to the rest when one process has ended
"""

import hashlib
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from llamatool.errors import InputError, LostRankError, ResourceError, UsageError

JOIN_SECONDS = 300.0  # to wait for every rank to come
NOTE_SECONDS = 10.0  # after which rank 0 says that it waits
POLL_SECONDS = 0.2  # between two looks into the store
SILENT_SECONDS = 60.0  # after which a rank without a beat, or a store without an answer, is gone
BEAT_SECONDS = 5.0  # between two looks at the beats of all
GRACE_SECONDS = 1.0  # that other ranks leave to rank 0, to say first what all have found
PATIENCE_SECONDS = 5.0  # that the main thread has to act on a signal
EXCHANGE_SECONDS = 1800.0  # for one exchange: loading may take longer on one rank
TOLD_CHARACTERS = 2**19  # in one text of the store, which takes up to 8 MiB
ABORT_EXIT = 4


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launcher told this process."""

    rank: int
    size: int
    local_rank: int  # among the processes of this machine
    address: str  # of rank 0's machine
    port: int
    hosts_store: bool  # False where the launcher keeps the store itself
    name: str  # of the run, so that a restart does not read what the first try wrote
    join_seconds: float = JOIN_SECONDS


@dataclass(slots=True)
class Crew:
    """The processes of a run, as one of them sees them."""

    launch: Launch
    store: Store
    watch: "Watch"
    device: torch.device = field(init=False)
    mesh: DeviceMesh = field(init=False)
    _told: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which reads input and writes output."""
        return self.launch.rank == 0

    def form(self, device: str, arguments: Sequence[str]) -> None:
        """Makes a group of all processes of this run, once every one of them is here.

        Args: device: `auto`, `cpu` or `cuda`; on GPUs each rank takes the one of its local number.
        arguments: of the command, which must be the same on all ranks.
        Raises: UsageError for a device that ranks cannot share, or other arguments on another
        rank; ResourceError if there are fewer GPUs than ranks, or they cannot be connected;
        LostRankError naming the ranks that did not come in time.
        """
        launch = self.launch
        self.device = _device(launch, device)
        _gather(self, _digest(list(arguments)))
        try:
            dist.init_process_group(
                "nccl" if self.device.type == "cuda" else "gloo",
                store=PrefixStore("group", self.store),
                rank=launch.rank,
                world_size=launch.size,
                timeout=timedelta(seconds=EXCHANGE_SECONDS),
                # NCCL then connects now, and not in the middle of the first sum.
                device_id=self.device if self.device.type == "cuda" else None,
            )
        except (RuntimeError, ValueError) as error:
            raise ResourceError(
                f"rank {launch.rank} cannot be connected to the others:"
                f" {str(error).partition(chr(10))[0]}",
                hint="GLOO_SOCKET_IFNAME, with GPUs NCCL_SOCKET_IFNAME, names the network"
                " interface that the machines share",
            ) from None
        assert dist.group.WORLD is not None
        self.mesh = DeviceMesh.from_group(dist.group.WORLD, self.device.type)

    def tell(self, make: Callable[[], str]) -> str:
        """What `make` gives on rank 0, on every rank. The others wait as long as it takes.

        Raises: LostRankError if the store is gone, and rank 0 with it.
        """
        key = f"told/{self._told}"
        self._told += 1
        text = make() if self.is_first else ""
        with _lost_with_store():
            if self.is_first:
                starts = range(0, len(text), TOLD_CHARACTERS)
                for number, start in enumerate(starts):
                    part = text[start : start + TOLD_CHARACTERS]
                    self.store.set(f"{key}/{number}", json.dumps(part))  # any text, in ASCII
                self.store.set(key, str(len(starts)))
                return text
            while not self.store.check([key]):
                time.sleep(POLL_SECONDS / 10)
            count = int(self.store.get(key))
            parts = (self.store.get(f"{key}/{number}") for number in range(count))
            return "".join(json.loads(part) for part in parts)

    def agree(self, value: object, about: str) -> None:
        """Makes sure that `value`, which JSON can hold, is the same on every rank.

        Ranks that go on with different values would wait for each other.
        Raises: InputError if that of rank 0 is another.
        """
        mine = _digest(value)
        if self.tell(lambda: mine) != mine:
            raise InputError(
                f"{about} of this rank differ from those of rank 0",
                hint="every machine needs the same files under the same path",
            )

    def claim(self, exit_code: int) -> bool:
        """Whether this rank is the one to say why the run ends; the others then end, too."""
        if not self.is_first:
            time.sleep(GRACE_SECONDS)
        return self.watch.claim(exit_code)

    def missing(self) -> list[int]:
        """Ranks that have stopped to show signs of life."""
        return self.watch.missing()

    def leave(self, *, in_order: bool) -> None:
        """Ends the group; in order, when all ranks have come here.

        Otherwise it stays open, and the process must end without closing it: what waits for an
        exchange on a GPU would wait for ever.
        """
        if in_order:
            with suppress(RuntimeError):
                dist.barrier(group=self.mesh.get_group())
        else:
            self.watch.let_others_go()
        self.watch.stop()
        with suppress(RuntimeError, ValueError):
            if in_order:
                dist.destroy_process_group()


def meet(
    launch: Launch,
    *,
    say: Callable[[str], None] = lambda message: None,
    on_end: Callable[[], None] = lambda: None,
) -> Crew:
    """The crew of this run, watched from now on; the others may be still to come.

    Args: say: prints, also from a rank that is silent otherwise. on_end: called before the watch
    ends the process.
    Raises: ResourceError if the port is taken; LostRankError if nobody keeps the store in time.
    """
    store, own = _open_stores(launch)
    watch = Watch(launch, own, say, on_end)
    with _lost_with_store():
        watch.start()
    return Crew(launch, store, watch)


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


def _open_stores(launch: Launch) -> tuple[Store, Store]:
    """The texts that all ranks see: a connection of this thread, and one of the watch.

    A connection that waits for an answer lets no other question through. Whoever answers at that
    port may be no store, and never say a word, so a thread of its own waits.

    Raises: ResourceError if the port is taken; LostRankError if nobody keeps the store in time.
    """
    found: list[Store] = []
    errors: list[Exception] = []

    def connect() -> None:
        try:
            for hosts in (launch.hosts_store and launch.rank == 0, False):
                client = TCPStore(
                    launch.address,
                    launch.port,
                    None,
                    hosts,
                    timedelta(seconds=launch.join_seconds),
                    wait_for_workers=False,
                )
                found.append(PrefixStore(launch.name, client))
        except (RuntimeError, ValueError) as error:
            errors.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(launch.join_seconds + PATIENCE_SECONDS)
    if len(found) == 2:
        return found[0], found[1]
    where = f"{launch.address}:{launch.port}"
    text = str(errors[0]).lower() if errors else ""
    if "in use" in text or "eaddrinuse" in text:
        raise ResourceError(
            f"port {launch.port} is taken by another program",
            where=where,
            hint="choose another one: torchrun --master-port, or MASTER_PORT",
        )
    raise LostRankError(
        f"rank {launch.rank} of {launch.size} found no rank 0 within {launch.join_seconds:g} s",
        where=where,
        hint="is it running, and can this machine reach that address and port?",
    )


@contextmanager
def _lost_with_store() -> Iterator[None]:
    """Turns the report that the store is gone into a LostRankError."""
    try:
        yield
    except RuntimeError:
        raise LostRankError("the connection to another rank broke") from None


def _gather(crew: Crew, arguments: str) -> None:
    """Waits until every rank is here, and sees whether all mean the same.

    Raises: LostRankError naming those that are not here in time; UsageError or ResourceError
    naming those that were started otherwise.
    """
    launch, store, kind = crew.launch, crew.store, crew.device.type
    deadline = time.monotonic() + launch.join_seconds
    note = time.monotonic() + NOTE_SECONDS
    ranks = range(launch.size)
    with _lost_with_store():
        store.set(f"here/{launch.rank}", f"{kind} {arguments}")
        while missing := [rank for rank in ranks if not store.check([f"here/{rank}"])]:
            if time.monotonic() > deadline:
                raise LostRankError(
                    f"{_names(missing)} of {launch.size} did not come within"
                    f" {launch.join_seconds:g} s",
                    hint="start every rank with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE",
                )
            if crew.is_first and time.monotonic() > note:
                note = deadline
                crew.watch.say(
                    f"waiting for {_names(missing)} of {launch.size}, {launch.join_seconds:g} s at"
                    " most (WORLD_SIZE in the environment says how many; unset it to run alone)"
                )
            time.sleep(POLL_SECONDS / 4)
        kinds, commands = zip(
            *(store.get(f"here/{rank}").decode().split(" ") for rank in ranks), strict=True
        )
    if others := [rank for rank in ranks if kinds[rank] != kinds[0]]:
        raise ResourceError(
            f"{_names(others)} would compute on {kinds[others[0]]}, and rank 0 on {kinds[0]}",
            hint="--device cpu is everywhere; does PyTorch see the GPUs of every machine?",
        )
    if others := [rank for rank in ranks if commands[rank] != commands[0]]:
        raise UsageError(
            f"the arguments of {_names(others)} differ from those of rank 0",
            hint="start every rank with the same command",
        )


class Watch:
    """Two threads of a rank that see what its main thread, busy or waiting, cannot see.

    One asks the store, the other looks at signals, and at whether the store still answers.
    """

    def __init__(
        self,
        launch: Launch,
        store: Store,
        say: Callable[[str], None],
        on_end: Callable[[], None],
    ) -> None:
        self.say = say
        self._launch = launch
        self._store = store
        self._on_end = on_end
        self._lock = threading.Lock()  # a store answers one thread at a time
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._look, self._guard)
        ]
        self._read, self._write = os.pipe()
        self._claimed = False
        self._heard: dict[int, tuple[int, float]] = {}  # beats of a rank, and since when so many
        self._num_unanswered = 0  # looks at the clock since the store has answered
        self._is_interrupted = self._is_stopped = False
        self._before: Callable[[int, FrameType | None], object] | int | None = None

    def start(self) -> None:
        """Begins to look, and takes the signals that end a process over from Python.

        Raises: RuntimeError if the store is gone.
        """
        self._store.add(f"beat/{self._launch.rank}", 1)
        os.set_blocking(self._write, False)
        self._before = signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Looks no longer."""
        self._ended.set()
        with suppress(OSError):
            os.write(self._write, b"\0")
        for thread in self._threads:
            thread.join(timeout=5 * POLL_SECONDS)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def claim(self, exit_code: int) -> bool:
        """Whether nobody has claimed the last word before."""
        mine = f"{self._launch.rank} {exit_code}"
        try:
            with self._asking():
                if self._claimed:
                    return False
                self._claimed = self._store.compare_set("last", "", mine).decode() == mine
        except RuntimeError:  # whoever kept the store is gone
            if self._claimed:
                return False
            self._claimed = self._launch.rank == (1 if self._launch.hosts_store else 0)
        return self._claimed

    def missing(self) -> list[int]:
        """Ranks whose beat has stopped; one that has not come yet has none."""
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
        while time.monotonic() < deadline:
            with suppress(RuntimeError):
                if not self._beats():
                    return
            time.sleep(POLL_SECONDS / 2)

    def _beats(self) -> dict[int, int] | None:
        """Of the ranks that have come and not said farewell; None if the store is gone."""
        beats: dict[int, int] = {}
        try:
            with self._asking():
                for rank in range(self._launch.size):
                    if rank != self._launch.rank and not self._store.check([f"gone/{rank}"]):
                        beats[rank] = self._store.add(f"beat/{rank}", 0)
        except RuntimeError:
            return None
        return {rank: count for rank, count in beats.items() if count}

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """The store for this thread alone. Raises: RuntimeError if it does not answer."""
        if not self._lock.acquire(timeout=PATIENCE_SECONDS):
            raise RuntimeError("the store does not answer")
        try:
            yield
        finally:
            self._lock.release()

    def _look(self) -> None:
        listened = time.monotonic()
        while not self._ended.wait(POLL_SECONDS):
            try:
                with self._asking():
                    self._store.add(f"beat/{self._launch.rank}", 1)
                    last = self._store.get("last") if self._store.check(["last"]) else b""
            except RuntimeError:
                self._store_lost()
                return
            self._num_unanswered = 0
            speaker, _, code = last.decode().partition(" ")
            if speaker and int(speaker) != self._launch.rank:
                self._end(int(code))
            if self._is_stopped:
                self._stopped()
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

    def _guard(self) -> None:
        """Acts where the store may not answer.

        Counts its own looks, not the time: a process that was stopped has waited for nobody.
        """
        patience = PATIENCE_SECONDS
        while not self._ended.is_set():
            signals = self._signals()
            if self._ended.is_set():
                return
            self._is_interrupted |= signal.SIGINT in signals
            self._is_stopped |= signal.SIGTERM in signals
            self._num_unanswered += 1
            if self._num_unanswered * POLL_SECONDS > SILENT_SECONDS:
                self._store_lost()
                return
            if self._is_interrupted or self._is_stopped:
                patience -= POLL_SECONDS
                if patience < 0 and not self._claimed:
                    self._cut_short()

    def _signals(self) -> bytes:
        """The numbers of signals that came, within one interval."""
        ready, _, _ = select.select([self._read], [], [], POLL_SECONDS)
        return os.read(self._read, 64) if ready else b""

    def _cut_short(self) -> None:
        """For the main thread, which waits for another rank, or on a GPU, and hears nothing."""
        code = 130 if self._is_interrupted else ABORT_EXIT
        if self.claim(code):
            self.say("interrupted" if self._is_interrupted else _STOPPED)
        self._end(code)

    def _stopped(self) -> None:
        """By torchrun, as a rule because another rank has ended; that rank may still speak."""
        if self._is_interrupted or self._claimed:  # the main thread has noticed, and says so
            return
        lost = self.missing()
        if self._ended.is_set() or self._claimed:
            return
        if self.claim(ABORT_EXIT):
            self.say(_gone(lost) if lost else _STOPPED)
        self._end(ABORT_EXIT)

    def _store_lost(self) -> None:
        """Nothing is left to ask: whoever kept the store has ended, or is cut off."""
        if self._ended.wait(2 * GRACE_SECONDS):
            return
        if not self._is_interrupted and self.claim(ABORT_EXIT):
            self.say(_gone([0]) if self._launch.hosts_store else _LAUNCHER_GONE)
        self._exit(130 if self._is_interrupted else ABORT_EXIT)

    def _end(self, code: int) -> None:
        if self._ended.is_set():
            return
        with suppress(RuntimeError), self._asking():
            self._store.set(f"gone/{self._launch.rank}", "")
        self.let_others_go()
        self._exit(code)

    def _exit(self, code: int) -> None:
        self._on_end()
        os._exit(code)


_STOPPED = "error: stopped by a signal (SIGTERM)"
_LAUNCHER_GONE = "error: the launcher of these ranks has ended, or cannot be reached"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _names(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def _gone(ranks: Sequence[int]) -> str:
    return (
        f"error: {_names(ranks)} of this run ended without a word (killed, or out of memory)\n"
        "hint: look at that machine's system log; `llamatool kv-budget` shows what a rank needs"
    )
