"""What the paper's experiments are made of: models, hyperparameters, data, metrics."""

import math

import pytest
import torch

from benchmarks import workloads
from benchmarks.paper import images, text
from benchmarks.paper.models import CNNS, LanguageModel, resnet18, wrn_16_4
from benchmarks.paper.optimizers import HYPERPARAMETERS, NAMES, make_optimizer, weight_decay
from benchmarks.paper.published import PUBLISHED
from benchmarks.paper.tasks import TASKS
from small_runs import p_runs

pytestmark = pytest.mark.usefixtures("one_thread")


def test_models_have_the_known_sizes():
    def shapes(model):
        return sorted(tuple(param.shape) for param in model.parameters())

    assert shapes(wrn_16_4(3, 10, 64)) == sorted(workloads.wide_resnet(16, 4))
    assert shapes(LanguageModel(10_000, 650, 2, 0.5)) == sorted(workloads.lstm(2, 650, 10_000))
    assert sum(param.numel() for param in resnet18(3, 10, 64).parameters()) == 11_173_962
    # Without the biases of convolutions, which the normalization after them would undo.
    convolutions = sum(9 * shape[0] * shape[1] + 2 * shape[0] for shape in workloads.vgg16()
                       if len(shape) == 4)  # fmt: skip
    vgg = CNNS["vgg16"](3, 10, 64)
    assert (
        sum(param.numel() for param in vgg.parameters())
        == convolutions + 2 * (512 * 512 + 512) + 5130
    )


@pytest.mark.parametrize("name", CNNS)
@pytest.mark.parametrize("size", [8, 32])
def test_cnns_take_images_of_digits_and_of_cifar(name, size):
    assert CNNS[name](3, 10, 4)(torch.randn(2, 3, size, size)).shape == (2, 10)


def test_decays_are_at_the_papers_epochs_in_proportion():
    assert TASKS["cifar10"].decay_epochs(200) == [100, 150]
    assert TASKS["ptb"].decay_epochs(200) == [100, 150]
    assert TASKS["imagenet"].decay_epochs(100) == [30, 60, 80]
    assert TASKS["imagenet"].decay_epochs(10) == [3, 6, 8]
    assert TASKS["cifar100"].decay_epochs(40) == [20, 30]
    # The shortest runs have no decay before they begin, nor two at once in the middle.
    assert TASKS["digits"].decay_epochs(1) == [1, 1]
    assert TASKS["digits"].decay_epochs(3) == [2, 3]


def test_hyperparameters_reach_the_optimizers():
    params = [torch.nn.Parameter(torch.ones(3))]
    groups = {
        (recipe, name): make_optimizer(name, options, params, 10_000).param_groups[0]
        for recipe, table in HYPERPARAMETERS.items()
        for name, options in table.items()
    }
    assert set(groups) == {
        (r, name) for r in ("cifar", "imagenet", "lstm2", "lstm3") for name in NAMES
    }
    for (recipe, name), group in groups.items():
        assert group["lr"] == HYPERPARAMETERS[recipe][name]["lr"]
        assert group.get("weight_decouple", False) is False
        if name == "adamw":
            factor = {"cifar": 0.025, "imagenet": 0.05}.get(recipe, 4e-4)
            assert group["lr"] * group["weight_decay"] == pytest.approx(factor / 100)
        else:
            assert group["weight_decay"] == (1.2e-6 if "lstm" in recipe else 5e-4)
        if name != "sgd":
            decay = 0.99 if name in ("adam", "amsgrad") and "lstm" not in recipe else 0.999
            assert group["betas"] == (0.9, decay)
    assert groups["cifar", "amsgrad"]["amsgrad"]
    assert not groups["cifar", "adam"]["amsgrad"]
    assert [groups[r, "padam"]["partial"] for r in HYPERPARAMETERS] == [1 / 8, 1 / 8, 0.4, 0.2]
    assert [groups[r, "padam"]["lr"] for r in HYPERPARAMETERS] == [0.1, 0.1, 0.01, 1]
    assert [groups[r, "sgd"]["lr"] for r in HYPERPARAMETERS] == [0.1, 0.1, 1, 10]
    assert [groups[r, "yogi"]["lr"] for r in HYPERPARAMETERS] == [0.001, 0.001, 0.01, 0.1]
    assert [groups[r, "adabound"]["final_lr"] for r in HYPERPARAMETERS] == [0.1, 0.1, 10, 100]


def test_normalized_weight_decay():
    # 200 epochs of CIFAR-10 by 128: 0.025 sqrt(128 / (50000 * 200)) is taken away in a step.
    assert 1e-3 * weight_decay(0.025, 1e-3, 200 * 50_000 / 128) == pytest.approx(
        0.025 * math.sqrt(128 / (50_000 * 200))
    )


def test_the_p_study():
    runs = p_runs(2)
    assert len({run.name for run in runs}) == len(runs) == 2 * 7 * 6
    params = [torch.nn.Parameter(torch.ones(3))]
    kinds = set()
    for run in runs:
        (group,) = make_optimizer("padam", run.options, params, 10).param_groups
        assert (group["lr"], group["weight_decay"]) == (0.1, 5e-4)
        kinds.add((group["partial"], group["amsgrad"], group["betas"], group["bias_correction"]))
    usual, without = (0.9, 0.999), (0.0, 0.999)
    assert kinds == {
        (p, *kind)
        for p in (1 / 16, 1 / 8, 1 / 5, 1 / 4, 2 / 5, 1 / 2)
        for kind in (
            (True, usual, "none"), (True, usual, "authors"), (False, usual, "none"),
            (False, without, "none"),
        )
    }  # fmt: skip


def test_the_papers_tables_are_whole():
    for (dataset, model, metric), values in PUBLISHED.items():
        assert len(values) == len(NAMES)
        (*_, task) = (task for task in TASKS.values() if task.paper == dataset)
        assert model in task.models
        assert metric.startswith(task.metric)


def test_penn_treebank(ptb):
    corpus = text.penn_treebank(ptb)
    # <eos> and "the" 60 and 30 times; words of one count by the alphabet; <unk> was not there.
    assert corpus.vocabulary == 7
    assert corpus.train[:7].tolist() == [0, 2, 5, 4, 0, 3, 1]
    assert corpus.test[:3].tolist() == [0, 2, 1]
    (ptb / "ptb.test.txt").write_text("the dog\n")
    assert text.penn_treebank(ptb).test.tolist() == [0, 6, 1]
    (ptb / "ptb.test.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"ptb.test.txt is not there; the files are"):
        text.penn_treebank(ptb)


def test_no_paragraph_is_in_both_parts_of_the_documentation():
    corpus = text.python_documentation()

    def paragraphs(words):
        words = words.tolist()
        parts, end = [[]], words[-1]
        for word in words:
            parts.append([]) if word == end else parts[-1].append(word)
        return {tuple(part) for part in parts if len(part) > 8}

    train_part, test_part = paragraphs(corpus.train), paragraphs(corpus.test)
    assert len(test_part) > 100
    # What differs in rare words only is the same here.
    assert len(train_part & test_part) <= 0.02 * len(test_part)


def test_perplexity_of_a_model_that_knows_nothing_is_the_number_of_words():
    corpus = text.Corpus(torch.arange(900) % 50, torch.arange(370) % 50, 50)
    problem = text.make_text_problem(corpus, "lstm2", 8, 0.5, 20, torch.device("cpu"))
    torch.nn.init.zeros_(problem.model.decoder.weight)
    torch.nn.init.zeros_(problem.model.decoder.bias)
    assert problem.evaluate()["test_perplexity"] == pytest.approx(50, rel=1e-5)
    assert problem.train.shape == (45, 20)
    assert problem.train[:, 1].tolist() == corpus.train[45:90].tolist()
    counts = [count for _, count in problem.losses()]
    assert len(counts) == problem.batches == 2
    assert counts == [35, 9]


def test_the_state_of_an_lstm_goes_on_from_batch_to_batch():
    corpus = text.Corpus(torch.arange(2000) % 50, torch.arange(900) % 7, 50)
    problem = text.make_text_problem(corpus, "lstm2", 8, 0.0, 20, torch.device("cpu"))
    in_parts = problem.evaluate()["test_perplexity"]
    with torch.no_grad():
        logits, _ = problem.model(problem.test[:-1], None)
    whole = torch.nn.functional.cross_entropy(logits.flatten(0, 1), problem.test[1:].flatten())
    assert in_parts == pytest.approx(math.exp(whole), rel=1e-5)


def test_test_error_counts_images():
    class First(torch.nn.Module):
        def forward(self, x):
            return torch.tensor([9.0, 5, 4, 3, 2, 1, 0, 0, 0, 0]).expand(len(x), 10)

    data = [(torch.zeros(1, 8, 8), label) for label in (0, 1, 4, 9)]
    loader = torch.utils.data.DataLoader(data, batch_size=3)
    problem = images.ImageProblem(First(), loader, loader, torch.device("cpu"), top5=True)
    assert problem.evaluate() == {"test_error": 75.0, "test_error_top5": 25.0}
