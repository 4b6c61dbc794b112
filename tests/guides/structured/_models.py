"""First call of a structured guide."""

from pyro_lvgp.guides import StructuredGPGuide
from tests.helpers.structured import make_data, make_model


def first_call(sites, *args, model=None):
    StructuredGPGuide(model or make_model(), encoders=sites)(*(args or make_data()))
