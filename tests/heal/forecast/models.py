"""Models whose verdict is known: of one feature, with one weight."""

from heal.lab.forecast.forecast_watch import Model


def model_of(feature="loss_climb", weight=6.0, bias=-2.0, limit=2.0, **changes):
    values = {
        "names": (feature,),
        "means": (0.0,),
        "scales": (1.0,),
        "layers": ((((weight,),), (bias,)),),
        "levels": (-10.0, 0.0, 10.0),
        "chances": (0.0, 0.5, 1.0),
        "memory": 4.0,
        "limits": {0.02: limit, 0.2: limit / 2},
        "stretch_steps": 500,
        "card": {},
    }
    return Model(**{**values, **changes})
