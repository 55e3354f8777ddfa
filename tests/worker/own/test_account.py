import time

import torch

from hetkit.planning.time_split import Stamps
from hetkit.worker.own.account import Account


def test_one_named_mean_keeps_its_own_count():
    account = Account(share=4)
    account.add(torch.tensor(2.0), 10, of="tokens", piece=2)
    account.add(torch.tensor(4.0), 30, of="tokens", piece=2)
    assert account.loss() == (140.0, 40.0)


def test_beside_means_over_samples_a_named_one_adds_its_mean():
    account = Account(share=4)
    account.add(torch.tensor(2.0), 4, of="samples", piece=4)
    account.add(torch.tensor(3.0), 10, of="tokens", piece=4)
    assert account.loss() == ((2.0 + 3.0) * 4, 4.0)


def test_without_samples_there_is_no_loss():
    assert Account(share=0).loss() == (0.0, 0.0)
    assert (Account(share=0).pieces, Account(share=5).pieces) == (0, 1)


def test_only_what_was_computed_counts_as_computing():
    account = Account(share=4)
    account.resume()
    account.interrupt()
    time.sleep(0.05)  # an exchange
    start = time.monotonic()
    stamps = Stamps(start=start, end=start, cut=start, data_s=0.0, optimizer_s=0.0)
    stamped = account.stamped(stamps)
    assert stamped.compute_s is not None
    assert stamped.compute_s < 0.05
    assert stamped.cut == start
