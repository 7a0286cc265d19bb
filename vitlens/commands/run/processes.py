"""How a run of several processes behaves like one: the first writes and prints, the others compute their share."""

from dataclasses import replace

from vitlens.commands.run.options import RunOptions
from vitlens.devices import resolve_device
from vitlens.processes import Processes, join


def join_run(options: RunOptions) -> tuple[Processes, RunOptions]:
    """The processes of this run, and the options for this one of them.

    It has its own device, and is quiet unless it is the first. To be called before models are loaded; a run then
    makes its folder in the first process alone, and returns None in the others.
    """
    processes = join(resolve_device(options.device))
    if processes.count == 1:
        return processes, options
    quiet = options.quiet or not processes.is_first
    return processes, replace(options, device=str(processes.device), quiet=quiet)
