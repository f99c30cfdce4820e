"""From a run's configuration to a run: the checks before anything is spent, the parts that are
built, and their order.

    run.train(run, out)                checks ─ demonstrations ─ tokenizer ─ policy ─ engine ─
                                       stages ─ training loop
    run.train(run, out, resume=path)   the same, continued from the checkpoint
    recipe.recipe("recipes/tiny.py")   the Run that its ``run()`` returns

This package composes the packages below and leaves every decision to them if they can make it.
Heavy imports happen when something is built.
"""
