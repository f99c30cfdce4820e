"""From a run's configuration to a run: what is checked before anything is spent, what is made, and
in what order.

    run.train(run, out)                checks ─ demonstrations ─ tokenizer ─ policy ─ engine ─ stages ─ the loop
    run.train(run, out, resume=path)   the same, and on from the checkpoint
    recipe.recipe("recipes/tiny.py")   the Run that its ``run()`` returns

Composes the rooms below and decides nothing that one of them could. Heavy imports happen when
something is built.
"""
