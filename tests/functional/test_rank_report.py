"""Monitoring of rank and alignment."""

import torch

from helpers.cuts import features, regions
from matbackprop import normalized_cut_j2, rank_report


def test_report_against_dense_bases():
    f, labels = features(3, 40, 5), regions(3, 40, k=4)
    report = rank_report(f, labels)
    e = torch.nn.functional.one_hot(labels).double()
    q_f, q_e = torch.linalg.qr(f)[0], torch.linalg.qr(e)[0]
    overlap = (q_f.mT @ q_e).square().sum((-2, -1))
    torch.testing.assert_close(report.alignment, 1 - overlap / 4)
    torch.testing.assert_close(report.singular_values, torch.linalg.svdvals(f))
    torch.testing.assert_close(report.j2, normalized_cut_j2(f, labels))
    assert report.rank.tolist() == [5, 5, 5]
    assert report.regions.tolist() == [4, 4, 4]
    assert not report.certified.any()
    assert (report.j2 >= 0.5).all()  # at least |rank − k|/2
    assert report.summary()["rank"] == 5


def test_certificate_holds_for_a_nearly_perfect_map_only():
    labels = regions(2, 30, k=3)
    e = torch.nn.functional.one_hot(labels).double()
    noise = torch.randn(2, 30, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    near, far = rank_report(e + 0.03 * noise, labels), rank_report(noise, labels)
    assert near.certified.all()
    assert (near.rank == near.regions).all()
    assert (near.alignment > 1e-6).all()  # certified, yet the spans differ
    assert not far.certified.any()
    assert (near.alignment < far.alignment).all()


def test_rank_of_float32_and_empty_maps():
    low = (features(50, 2).float() @ features(2, 6, seed=1).float()).double()
    labels = regions(50, k=2)
    assert rank_report(low, labels, rank_tol=torch.float32).rank == 2
    assert rank_report(low.float(), labels).rank == 2
    dead = rank_report(torch.zeros(10, 3), regions(10, k=2))
    assert (dead.rank, dead.alignment, dead.j2) == (0, 1, 1)


def test_annotators_packing_and_weights():
    f = features(30, 4)
    labels = torch.stack([regions(30, k=k, seed=k) for k in (2, 3)])
    labels[:, 12:15] = torch.arange(3).clamp(max=1)
    report = rank_report(f, labels, offsets=[0, 12, 30], weight=torch.ones(30))
    assert report.rank.shape == (2, 2)
    alone = rank_report(f[12:], labels[1, 12:])
    torch.testing.assert_close(report.alignment[1, 1], alone.alignment)
    assert not report.j2.requires_grad


def test_features_of_any_scale_have_the_same_report():
    f, labels = features(3, 40, 5), regions(3, 40, k=4)
    report = rank_report(f, labels)
    for scale in (1e-200, 1e200):
        scaled = rank_report(scale * f, labels)
        torch.testing.assert_close(scaled.j2, report.j2)
        torch.testing.assert_close(scaled.singular_values, scale * report.singular_values, rtol=1e-12, atol=0)
        assert scaled.rank.tolist() == report.rank.tolist()
