// What a write to a DTensor changes beside its values: the version that autograd and views look at, and values kept of it.
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <gmock/gmock.h>

#include <tessera/tests/dtensor/layouts.h>

namespace tessera::testing::write_test {
namespace {

using at::Tensor;
using ::testing::HasSubstr;
using Tensors = std::vector<Tensor>;

Tensor numbers(const std::vector<int64_t>& sizes) {
  const auto numel = std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  return torch::arange(1, numel + 1, torch::kDouble).view(sizes);
}

TEST(Write, ListOperatorsCountVersions) {
  const auto mesh = line_mesh();
  auto weight = Tensor(make(numbers({4, 3}), mesh, {Shard{0}})).requires_grad_();
  const auto loss = weight.square().sum();
  const auto before = weight._version();
  {
    const at::NoGradGuard no_grad;
    at::_foreach_mul_({weight}, 10);
    at::_foreach_add_({weight, weight}, 1);
  }
  EXPECT_EQ(weight._version(), before + 3);
  EXPECT_THAT(error_of([&] { loss.backward(); }), HasSubstr("modified by an inplace operation"));
}

TEST(Write, CountsVersionsOfWhatToLocalReturned) {
  using Edit = std::function<void(Tensor&)>;
  const std::vector<Edit> edits{[](Tensor& weight) { weight.mul_(2); }, [](Tensor& weight) { at::_foreach_mul_({weight}, 2); },
                                [](Tensor& weight) { weight.t().mul_(2); },
                                [](Tensor& weight) {
                                  const Tensors state[]{{weight.clone()}, {weight.clone()}, {weight.clone()}};
                                  at::_fused_adamw_({weight}, state[0], state[1], state[2], {}, {torch::ones({}, test_device())},
                                                    0.1, 0.9, 0.99, 0.1, 1e-8, false, false);
                                }};
  for (size_t i = 0; i < edits.size(); ++i) {
    SCOPED_TRACE(i);
    auto weight = Tensor(make(numbers({4, 3}), line_mesh(), {Shard{0}})).requires_grad_();
    const auto loss = to_local(weight).pow(3).sum();
    {
      const at::NoGradGuard no_grad;
      edits[i](weight);
    }
    EXPECT_THAT(error_of([&] { loss.backward(); }), HasSubstr("modified by an inplace operation"));
  }
}

TEST(Write, ListOperatorsMakeCopiedViewsStale) {
  if (world_size() == 1) GTEST_SKIP() << "one rank moves nothing";
  std::vector<int64_t> extents(world_size(), 0);
  extents.front() = 1;
  extents.back() = 4;
  auto base = Tensor(make(numbers({5, 3}), line_mesh(), {RaggedShard{0, extents}}));
  const auto copy = base.t();
  at::_foreach_add_({base}, 1);
  EXPECT_THAT(error_of([&] { copy + 1; }), HasSubstr("Take the view again"));
}

/// Writes of lists of `w`, `v` (both square) and the row `r`, in which later elements read what earlier ones write.
struct ListWrite {
  std::string name;
  std::function<void(Tensor& w, Tensor& v, Tensor& r)> apply;
};

std::vector<ListWrite> dependent_writes() {
  return {{"add_ of the transposed",
           [](Tensor& w, Tensor& v, Tensor&) {
             at::_foreach_add_({w, v}, {v.t(), w.t()});
           }},
          {"mul_ of one another",
           [](Tensor& w, Tensor& v, Tensor&) {
             at::_foreach_mul_({w, v, w}, {v, w, v});
           }},
          {"copy_ of the transposed",
           [](Tensor& w, Tensor& v, Tensor&) {
             at::_foreach_copy_({w, v}, {v.t(), w.t()});
           }},
          {"one tensor twice",
           [](Tensor& w, Tensor& v, Tensor&) {
             at::_foreach_add_({w, w, v}, {v.t(), v, w}, 2);
           }},
          {"addcmul_ by a list of numbers",
           [](Tensor& w, Tensor& v, Tensor&) {
             const double scales[]{1, 2, 3};
             at::_foreach_addcmul_({w, v, w}, {v.t(), w.t(), v}, {v, v, w}, std::vector<at::Scalar>(scales, scales + 3));
           }},
          {"addcdiv_ by a number",
           [](Tensor& w, Tensor& v, Tensor&) {
             at::_foreach_addcdiv_({w, v}, {v, w.t()}, {v.t(), w}, 2);
           }},
          {"lerp_",
           [](Tensor& w, Tensor& v, Tensor&) {
             at::_foreach_lerp_({w, v}, {v.t(), w.t()}, 0.25);
           }},
          {"a row before what it is broadcast over",
           [](Tensor& w, Tensor& v, Tensor& r) {
             at::_foreach_add_({r, w, r, v}, {r, r, r, r});
           }},
          {"numbers alone", [](Tensor& w, Tensor& v, Tensor&) {
             at::_foreach_add_({w, v, w}, std::vector<at::Scalar>{1, 2, 3});
             at::_foreach_mul_({w, v, w}, 2);
           }}};
}

void expect_list_write_as_in_one_process(const ListWrite& write, int64_t size, const Placements& placements) {
  const auto mesh = line_mesh();
  const std::vector<Tensor> wholes{numbers({size, size}) / 8, numbers({size, size}).flip({0}), numbers({1, size})};
  std::vector<Tensor> plain, sharded;
  for (size_t i = 0; i < wholes.size(); ++i) {
    plain.push_back(wholes[i].clone());
    sharded.push_back(make(wholes[i], mesh, {placements[i]}));
  }
  const at::NoGradGuard no_grad;
  write.apply(plain[0], plain[1], plain[2]);
  const auto error = error_of([&] { write.apply(sharded[0], sharded[1], sharded[2]); });
  const bool is_stale = error.find("Take the view again") != std::string::npos; // a view that is a copy, of a written tensor
  if (!is_stale) ASSERT_EQ(error, "no error");
  for (size_t i = 0; i < plain.size(); ++i)
    EXPECT_TENSORS_CLOSE(whole_of(sharded[i]), is_stale ? wholes[i] : plain[i]) << "tensor " << i;
}

/// As in one process, where one element is written after another; or, where a view had to be copied, an error before any write.
TEST(Write, AnElementOfAListSeesWhatThoseBeforeItWrote) {
  for (const int64_t size : {0, 1, 3, 4}) {
    auto places = whole_placements({size, size}, world_size());
    places.emplace_back(Partial{});
    places.emplace_back(Partial{Partial::Op::kAvg});
    for (size_t i = 0; i < places.size(); ++i) {
      for (const auto& of_v : sweep(places, 3)) {
        const auto of_r = i % 2 == 0 ? Placement(Replicate{}) : Placement(Shard{1});
        for (const auto& write : dependent_writes()) {
          SCOPED_TRACE(c10::str(write.name, " of ", to_string(places[i]), " and ", to_string(of_v), ", size ", size));
          expect_list_write_as_in_one_process(write, size, {places[i], of_v, of_r});
        }
      }
    }
  }
}

/// A one-element Partial(sum) of value ranks * (ranks + 1) / 2, and its local tensor.
struct Sum {
  explicit Sum(const std::vector<int64_t>& sizes)
      : local(torch::full(sizes, process_context().rank() + 1.0, torch::dtype(torch::kDouble).device(test_device()))),
        tensor(from_local(local, line_mesh(), {Partial{}}).requires_grad_(false)),
        value(static_cast<double>(world_size() * (world_size() + 1)) / 2) {}
  Tensor local, tensor;
  double value;
};

TEST(Write, TheKeptValueOfASumFollowsEveryWrite) {
  for (const auto& sizes : {std::vector<int64_t>{}, std::vector<int64_t>{1}}) {
    Sum sum(sizes);
    auto& tensor = sum.tensor;
    double expected = sum.value;
    const auto expect_times = [&](double factor, const char* what) {
      expected *= factor;
      EXPECT_EQ(tensor.item<double>(), expected) << what;
      EXPECT_EQ(DTensor(tensor).full_tensor().item<double>(), expected) << what;
    };
    expect_times(1, "nothing");
    tensor.mul_(2);
    expect_times(2, "in place");
    tensor.data().mul_(3);
    expect_times(3, "data()");
    at::_foreach_mul_({tensor}, 2);
    expect_times(2, "a list");
    to_local(tensor).mul_(3);
    expect_times(3, "to_local()");
    sum.local.mul_(2);
    expect_times(2, "the tensor of from_local");
    auto whole = DTensor(tensor).full_tensor();
    whole.mul_(10);
    auto moved = Tensor(DTensor(tensor).redistribute({Replicate{}}));
    moved.mul_(10);
    if (world_size() > 1) expect_times(1, "what it was reduced to");
  }
}

TEST(Write, TheValueOfASumFollowsWritesThroughViews) {
  Sum sum({1});
  EXPECT_EQ(sum.tensor.item<double>(), sum.value);
  auto view = sum.tensor.view({1, 1});
  EXPECT_EQ(view.item<double>(), sum.value);
  sum.tensor.data().view({1, 1, 1}).mul_(2);
  EXPECT_EQ(sum.tensor.item<double>(), 2 * sum.value);
  EXPECT_EQ(view.item<double>(), 2 * sum.value);
  view.mul_(2);
  EXPECT_EQ(sum.tensor.item<double>(), 4 * sum.value);
}

/// An element of a split tensor lies in the memory of one rank's part alone.
TEST(Write, OfAnElementThatIsReducedIsRefused) {
  if (world_size() == 1) GTEST_SKIP() << "one rank reduces nothing";
  auto base = Tensor(make(numbers({5, 3}), line_mesh(), {Shard{0}}));
  auto element = base[4][2];
  const auto error = error_of([&] { element.mul_(2).add_(1); });
  if (error == "no error") {
    base.mul_(0.5);
    EXPECT_EQ(DTensor(element).full_tensor().item<double>(), (15 * 2 + 1) * 0.5);
  } else {
    EXPECT_THAT(error, HasSubstr("would have to be reduced, which a tensor whose memory another one shares cannot be in place"));
  }
}

TEST(Write, ClipGradNormOfOneElementSums) {
  for (const auto& sizes : {std::vector<int64_t>{}, std::vector<int64_t>{1}}) {
    const Sum sum(sizes);
    auto weight = Tensor(make(torch::ones(sizes, torch::kDouble), line_mesh(), {Replicate{}})).requires_grad_();
    weight.mutable_grad() = sum.tensor;
    EXPECT_NEAR(torch::nn::utils::clip_grad_norm_({weight}, 0.5), sum.value, 1e-6);
    EXPECT_NEAR(DTensor(weight.grad()).full_tensor().item<double>(), 0.5, 1e-5);
  }
}

TEST(Write, CopiesIntoAnotherTypeReduceFirst) {
  const auto mesh = line_mesh();
  const auto halves = Tensor(from_local(torch::full({2}, 0.5, mesh.device()), mesh, {Partial{}}));
  const auto expected = torch::full({2}, world_size() / 2, torch::kInt);
  for (const Placement& placement : {Placement(Replicate{}), Placement(Shard{0}), Placement(Partial{})}) {
    const auto target = [&] { return Tensor(make(torch::zeros({2}, torch::kInt), mesh, {placement})); };
    const auto check = [&](const auto& copy) {
      auto written = target();
      copy(written);
      EXPECT_TENSORS_CLOSE(DTensor(written).full_tensor(), expected);
    };
    check([&](Tensor& written) { written.copy_(halves); });
    check([&](Tensor& written) { at::_foreach_copy_({written}, {halves}); });
    check([&](Tensor& written) { written.fill_(halves.select(0, 0)); });
  }
}

TEST(Write, AveragesBesideNarrowTypesDoNotOverflow) {
  const auto mesh = line_mesh();
  const std::vector<int64_t> sizes{4};
  for (const auto& whole :
       {torch::ones(sizes, torch::kBool), torch::full(sizes, 100, torch::kChar), torch::full(sizes, 60000, torch::kHalf)}) {
    const auto split = Tensor(make(whole, mesh, {Shard{0}}));
    const auto average = Tensor(from_local(torch::zeros(sizes, mesh.device()), mesh, {Partial{Partial::Op::kAvg}}));
    EXPECT_TENSORS_CLOSE(DTensor(split + average).full_tensor(), whole + torch::zeros(sizes));
    EXPECT_TENSORS_CLOSE(DTensor(average.add(split, 2)).full_tensor(), torch::zeros(sizes).add(whole, 2));
  }
}

/// Fills the diagonal of a tensor under each placement; with `in_graph`, of a copy, whose gradient is compared as well.
void expect_diagonal_filled(const Tensor& whole, const Placement& placement, bool wrap, bool in_graph) {
  const auto mesh = line_mesh();
  auto plain = whole.clone().requires_grad_(in_graph);
  auto sharded = Tensor(make(whole, mesh, {placement})).requires_grad_(in_graph);
  auto expected = in_graph ? plain * 2 : plain, filled = in_graph ? sharded * 2 : sharded;
  expected.fill_diagonal_(.5, wrap);
  EXPECT_TRUE(filled.fill_diagonal_(.5, wrap).is_same(filled));
  EXPECT_TENSORS_CLOSE(whole_of(filled.detach()), expected.detach());
  if (!is_partial(placement)) EXPECT_EQ(DTensor(filled).placements(), Placements{placement});
  if (!in_graph) return;
  expected.square().sum().backward();
  filled.square().sum().backward();
  EXPECT_TENSORS_CLOSE(whole_of(sharded.grad()), plain.grad());
}

TEST(Write, FillsDiagonals) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{4, 4}, {3, 5}, {9, 2}, {1, 1}, {1, 3}, {0, 3}, {3, 3, 3}}) {
    auto placements = whole_placements(sizes, world_size());
    for (const auto& partial : partials()) placements.push_back(partial);
    for (const auto& placement : placements) {
      for (const bool wrap : {false, true}) {
        SCOPED_TRACE(c10::str(c10::IntArrayRef(sizes), " ", to_string(placement), wrap ? ", wrapped" : ""));
        const auto whole = numbers(sizes);
        expect_diagonal_filled(whole, placement, wrap, /*in_graph=*/false);
        if (!is_partial(placement)) expect_diagonal_filled(whole, placement, wrap, /*in_graph=*/true);
        const c10::InferenceMode inference;
        expect_diagonal_filled(whole, placement, wrap, /*in_graph=*/false);
      }
    }
  }
}

TEST(Write, FusedAdamReturnsListsOfDifferentlyPlacedTensors) {
  const auto mesh = line_mesh();
  const Placements placements[] = {{Shard{0}}, {Shard{1}}, {Replicate{}}};
  const auto step = [&](bool plain) {
    std::array<Tensors, 5> lists;
    for (size_t list = 0; list < lists.size(); ++list) {
      for (const auto& placement : placements) {
        const auto whole = numbers({4, 4}) + static_cast<double>(list);
        lists[list].push_back(plain ? whole : Tensor(make(whole, mesh, placement)));
      }
    }
    const Tensors steps(3, torch::tensor(3.0F).to(plain ? c10::Device(at::kCPU) : test_device()));
    const auto [parameters, gradients, averages, squares, max_squares] =
        at::_fused_adam(lists[0], lists[1], lists[2], lists[3], lists[4], steps, 0.1, 0.9, 0.99, 0.1, 1e-8, true, false);
    return std::vector<Tensors>{parameters, averages, squares, max_squares};
  };
  const auto expected = step(true), actual = step(false);
  for (size_t list = 0; list < expected.size(); ++list) {
    for (size_t i = 0; i < expected[list].size(); ++i) {
      EXPECT_EQ(DTensor(actual[list][i]).placements(), placements[i]);
      EXPECT_TENSORS_CLOSE(DTensor(actual[list][i]).full_tensor(), expected[list][i]);
    }
  }
}

} // namespace
} // namespace tessera::testing::write_test
