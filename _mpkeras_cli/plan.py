"""`mpkeras plan`: what to change in the training of a saved model so that it fits into memory."""

from _mpkeras_cli.command import (
    add_model,
    add_open_size,
    add_plot,
    add_report,
    compiled,
    count,
    import_mpkeras,
    positive,
)


def add_plan(subparsers):
    option = add_report(
        subparsers,
        "plan",
        _plan,
        help="what to change in the training of a saved model so that it fits into memory",
        description="""\
Compiles the training step of a saved model in one way after the other, until one fits into the memory that there is.

  mpkeras plan model.keras --device t4 --batch 64
  mpkeras plan model.keras --memory 16GB --batch 32 --json

What may be changed: the policy, the optimizer's slots, what is computed again in the backward pass, and how many parts
of a batch are taken one after the other. Devices and compilers: as in `mpkeras forecast`. Nothing is run.
""",
    )
    add_model(option)
    option("--memory", metavar="SIZE", help="what there is, such as 16GB; 5 %% are left free")
    option("--device", metavar="NAME", help="what to compile for, and without --memory what it has (default: h100)")
    option("--batch", type=count, metavar="N", help="rows of a batch (default: those of the model, or 32)")
    option("--largest-batch", action="store_true", help="look for the largest batch that fits with all that is allowed")
    option(
        "--policy",
        action="append",
        metavar="NAME",
        dest="policies",
        help="may be repeated, the best first (default: the model's, and one in 16 bits)",
    )
    option(
        "--allow",
        action="append",
        choices=("slots", "remat", "accumulation"),
        metavar="NAME",
        help="slots, remat or accumulation; may be repeated (default: all)",
    )
    option("--budget", type=positive("seconds"), default=600, metavar="S", help="seconds for all (default: 600)")
    add_open_size(option)
    add_plot(option, "plan.png")


def _plan(args):
    if args.memory is None and args.device is None:
        args.error("expected --memory or --device, what the training is to fit into; pass --memory 16GB or --device t4")
    import_mpkeras(args.error)
    from _mpkeras_cli.saved_model import plan_saved
    from mpkeras.tools.forecast.memory_plan import bytes_of

    if args.memory is not None:
        try:
            bytes_of(args.memory)
        except ValueError:
            args.error(f"argument --memory: expected a size such as 16GB or 16GiB, received {args.memory!r}")
    options = {"allow": args.allow} if args.allow else {}
    batch = "largest" if args.largest_batch else "keep"
    return compiled(args, plan_saved, memory=args.memory, batch=batch, **options)
