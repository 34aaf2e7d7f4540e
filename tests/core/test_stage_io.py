from shardwise.techniques.pipeline.stage_io import crossing, maker


def test_values_cross_from_their_maker_to_their_last_user():
    """The figure of the file: what is used further on is handed on by the stages between."""
    made, used = [(0,), (0,), (1,)], [(0, 1), (1, 3), (2,)]
    assert crossing(made, used, 4) == ((0, 1), (1, 2), (1,))


def test_what_nobody_uses_later_does_not_cross():
    """A value of its own stage, and one that is used nowhere."""
    assert crossing([(0,), (1,)], [(0,), ()], 2) == ((),)


def test_a_parameter_of_two_stages_comes_from_the_nearest():
    """A tied weight of stages 0 and 2 crosses to stage 1, and from 2 to 3, not from 0 to 2."""
    assert crossing([(0, 2)], [(0, 1, 2, 3)], 4) == ((0,), (), (0,))
    assert [maker((1, 3), use) for use in range(5)] == [None, 1, 1, 3, 3]
