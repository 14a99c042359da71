"""``ecornn serve``."""

from __future__ import annotations

import time

import click

from ecornn.cli.common import JSON, as_json, plain_errors
from ecornn.interrupts import ENDING, safe_interrupts

EPILOG = """\
One tracker, a server on each GPU or CPU, and a tuner, which has all servers of its key until it ends:

\b
  python -m tvm.exec.rpc_tracker --host 127.0.0.1 --port 9190
  CUDA_VISIBLE_DEVICES=0 ecornn serve --tracker 127.0.0.1:9190 --key h100
  CUDA_VISIBLE_DEVICES=1 ecornn serve --tracker 127.0.0.1:9190 --key h100
  ecornn tune --cell lstm --hidden 800 --tracker 127.0.0.1:9190 --key h100

Between machines, tunnels keep all ports on loopback (ssh -L and -R); or, on a network where everybody may
run any program on these machines, --host and --allow-remote.
"""


@click.command(epilog=EPILOG)
@click.option("--tracker", required=True, metavar="HOST:PORT", help="The TVM RPC tracker to register at.")
@click.option("--key", default="ecornn", show_default=True,
              help="What tuners ask for. Servers with the same key must measure on equal devices.")
@click.option("--target", type=click.Choice(["cuda", "cpu"]),
              help="What to measure on.  [default: cuda if there is a GPU, else cpu]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(1, 65_000), default=9200, show_default=True,
              help="First port to try, of 100.")
@click.option("--address", help="What tuners connect to, where that is not --host.")
@click.option("--allow-remote", is_flag=True,
              help="Other addresses than this machine's own. Whoever reaches them can run any code here.")
@JSON
@plain_errors
def serve(tracker: str, key: str, target: str | None, host: str, port: int, address: str | None,
          allow_remote: bool, json: bool) -> None:
    """Measures candidates for tuners elsewhere, through TVM's RPC. Ctrl-C ends it."""
    from ecornn.tune.choose import default_target, present
    from ecornn.tune.remote import Tracker, is_loopback, require_loopback, start

    registry = Tracker.parse(tracker, key, allow_remote)
    for name, value in (("host", host), ("address", address)):
        if value is not None:
            require_loopback(name, value, allow_remote)
    if not is_loopback(host):
        click.echo(f"warning: whoever reaches {host} can run any program here as this user; RPC is remote execution",
                   err=True)
    chosen = target or default_target()
    device = present(chosen)
    registry.servers()  # or say at once that there is no tracker
    server = start(chosen, (registry.host, registry.port), key, host, port, address)
    try:
        with safe_interrupts(*ENDING):
            if json:
                as_json({"device": device.name, "arch": device.arch, "host": host, "port": server.port, "key": key,
                         "tracker": str(registry)})
            else:
                click.echo(f"{device.name} ({device.arch}) at {host}:{server.port}, key {key}, tracker {registry}")
            while server.proc.is_alive():
                time.sleep(0.5)
        click.echo("error: the server ended by itself", err=True)
        raise SystemExit(1)
    except KeyboardInterrupt:
        click.echo("stopped", err=True)
    finally:
        server.terminate()
