"""The parts of `sharding.py`: a model of one namespace that is spread over several leaders."""
