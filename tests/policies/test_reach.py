import pytest

from mpkeras.policies.reach import asks_for


def if_training(self, x, training=False):
    if training:
        return x
    return self.end(x)


def unless_training(self, x, training=False):
    return x if not training else self.end(x)


def none_is_false(self, x, training=None):
    if training is None:
        training = False
    return self.end(x, training=training)


def equal(self, x, training=None):
    return x if training == False else self.end(x)  # noqa: E712


def both(self, x, training=None):
    if x and training:
        return self.end(x)
    return x


def inside(self, x, *, training=None):
    def end():
        return x if training else self.end(x)

    return end()


def handed_on(self, x, training=None):
    return self.end(self.body(x, training), training=training)


def another(self, x, mask=None, training=None):
    return x if mask else self.end(x, training=training)


@pytest.mark.parametrize("function", [if_training, unless_training, none_is_false, equal, both, inside])
def test_code_that_goes_by_an_argument(function):
    assert asks_for(function, "training")


@pytest.mark.parametrize("function", [handed_on, another])
def test_code_that_only_hands_an_argument_on(function):
    assert not asks_for(function, "training")
