"""Makes and judges the model of :mod:`heal.lab.forecast`: corpus, training, evaluation.

Not installed with the package, which only needs the finished ``model.json``. Needs scikit-learn.
"""
