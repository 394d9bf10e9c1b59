import os
import select
import signal

import pytest

from normkit.lab.runs.interrupts import Interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_wakes_the_second_raises(number: signal.Signals):
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        assert not interrupts.asked
        assert select.select([interrupts.wake], [], [], 0)[0] == []
        os.kill(os.getpid(), number)
        assert interrupts.asked
        assert select.select([interrupts.wake], [], [], 0)[0] == [interrupts.wake]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before
