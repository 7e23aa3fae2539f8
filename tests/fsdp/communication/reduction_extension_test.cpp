// Reductions by policy, of chunks of numbers: against the plain reductions.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <string>
#include <vector>

#include <tessera/collectives/run_ranks.h>
#include <tessera/fsdp/communication.h>
#include <tessera/mesh/device_mesh.h>

#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::reduction_extension_test {
namespace {

using torch::Tensor;
using Kind = ReductionStage::Kind;

/// Three parameters in uneven rows over `ranks` chunks, with gaps: [rows, 5], [7] and [3, 4], of which the last chunks may have
/// nothing.
std::shared_ptr<const GradientLayout> make_layout(int64_t ranks, int64_t rows, torch::Dtype dtype) {
  auto layout = std::make_shared<GradientLayout>();
  layout->names = {"w", "b", "v"};
  layout->sizes = {{rows, 5}, {7}, {3, 4}};
  layout->dtype = dtype;
  layout->chunks.resize(static_cast<size_t>(ranks));
  for (size_t p = 0; p < 3; ++p) {
    const int64_t count = layout->sizes[p][0], each = (count + ranks - 1) / ranks, row = p == 1 ? 1 : layout->sizes[p][1];
    for (int64_t r = 0; r < ranks; ++r) {
      const int64_t own = std::min(each, std::max<int64_t>(0, count - r * each));
      if (own > 0) {
        auto sizes = layout->sizes[p];
        sizes[0] = own;
        layout->chunks[static_cast<size_t>(r)].push_back({p, layout->flags, sizes});
      }
    }
    layout->flags += (each * row + 15) / 8 * 8;
  }
  layout->chunk_numel = layout->flags + 8;
  return layout;
}

/// Random gradients of this rank in all chunks; what lies between them is not finite.
Tensor gradients_of(const GradientLayout& layout, int64_t used = -1) {
  auto all = torch::full({static_cast<int64_t>(layout.chunks.size()), layout.chunk_numel}, NAN, layout.dtype);
  for (size_t r = 0; r < layout.chunks.size(); ++r) {
    auto chunk = all[static_cast<int64_t>(r)];
    for (const auto& piece : layout.chunks[r]) chunk.narrow(0, piece.offset, piece.numel()).copy_(torch::randn({piece.numel()}));
    for (int64_t p = 0; p < 3; ++p) chunk[layout.flags + p] = used < 0 || used == p ? 1 : 0;
  }
  return all.view({-1});
}

Tensor piece_in(const Tensor& values, const GradientLayout& layout, size_t chunk, const GradientPiece& piece,
                int64_t first_chunk) {
  return values.narrow(0, (static_cast<int64_t>(chunk) - first_chunk) * layout.chunk_numel + piece.offset, piece.numel());
}

/// All pieces of `chunks` chunks from `first` on, one after another.
Tensor pieces_of(const Tensor& values, const GradientLayout& layout, int64_t first, int64_t chunks) {
  std::vector<Tensor> parts{torch::zeros({0}, values.options())};
  for (int64_t c = first; c < first + chunks; ++c) {
    for (const auto& piece : layout.chunks[static_cast<size_t>(c)])
      parts.push_back(piece_in(values, layout, static_cast<size_t>(c), piece, first));
  }
  return torch::cat(parts);
}

Tensor sum_over_ranks(Communicator& ranks, const Tensor& values) {
  auto sum = values.to(torch::kDouble).clone();
  ranks.all_reduce(sum, ReduceOp::kSum, "sum").wait();
  return sum;
}

struct Case {
  std::shared_ptr<const GradientLayout> layout;
  ReductionStage stage;
  int64_t out_first = 0, out_chunks = 1; ///< chunks of the output
};

Case make_case(Kind kind, Communicator& ranks, int64_t rows, torch::Dtype dtype) {
  Case made;
  const bool scatters = kind == Kind::kReduceScatter;
  made.layout = make_layout(scatters ? ranks.size() : 1, rows, dtype);
  made.stage = {.kind = kind, .chunks = scatters ? ranks.size() : 1, .communicator = &ranks};
  made.out_first = scatters ? ranks.rank() : 0;
  return made;
}

Tensor reduced(ReductionExtension& extension, const Case& each, ReduceOp op, const Tensor& input) {
  const auto in = input.clone();
  const auto output = each.stage.kind == Kind::kReduceScatter ? torch::full({each.layout->chunk_numel}, 77, input.options()) : in;
  extension.reduce({each.stage, op, in, output, "test"}).wait();
  return output;
}

const std::vector<BlockCodec> kCodecs{
    {Wire::kInt8, 256}, {Wire::kInt4, 16}, {Wire::kFloat8, 64}, {Wire::kSign, 8}, {Wire::kInt8, 8}};

/// The plain result of this rank's output.
Tensor expected_of(const Case& each, ReduceOp op, const Tensor& input) {
  auto& ranks = *each.stage.communicator;
  auto sum = sum_over_ranks(ranks, input.nan_to_num(0));
  if (op == ReduceOp::kAvg) sum /= ranks.size();
  return sum.narrow(0, each.out_first * each.layout->chunk_numel, each.layout->chunk_numel);
}

double largest_over_ranks(Communicator& ranks, const Tensor& values) {
  auto most = values.numel() == 0 ? torch::zeros({1}) : values.abs().max().to(torch::kFloat).view({1});
  ranks.all_reduce(most, ReduceOp::kMax, "largest").wait();
  return most.item<double>();
}

void expect_plain_mean(Communicator& ranks, Kind kind, const BlockCodec& codec, int64_t rows, torch::Dtype dtype, ReduceOp op) {
  SCOPED_TRACE(c10::str(to_string(codec.wire), " blocks of ", codec.block, ", ", rows, " rows of ", dtype,
                        kind == Kind::kAllReduce ? ", all-reduce" : ", reduce-scatter", op == ReduceOp::kSum ? ", sum" : ""));
  const auto each = make_case(kind, ranks, rows, dtype);
  const auto extension = quantized_reduction({.codec = codec, .smallest = 0})->make(each.layout, {each.stage});
  const auto input = gradients_of(*each.layout, ranks.rank() % 2);
  const auto output = reduced(*extension, each, op, input), expected = expected_of(each, op, input);
  const double most = largest_over_ranks(ranks, pieces_of(input, *each.layout, 0, each.stage.chunks));
  const double codings = kind == Kind::kAllReduce ? 2 : 1, ulp = dtype == torch::kBFloat16 ? 0.008
                                                                 : dtype == torch::kHalf   ? 0.001
                                                                                           : 1e-6;
  const double total = op == ReduceOp::kSum ? most * ranks.size() : most;
  const double bound = (codings * codec.largest_error() * 1.001 + 2 * ulp) * total * (codec.wire == Wire::kSign ? 2 : 1);
  const auto got = pieces_of(output, *each.layout, each.out_first, 1).to(torch::kDouble);
  const auto want = pieces_of(expected, *each.layout, each.out_first, 1);
  if (got.numel() > 0) {
    EXPECT_LE((got - want).abs().max().item<double>(), bound);
  }
  const auto flags = output.narrow(0, each.layout->flags, 3);
  EXPECT_EQ(flags[0].item<double>() != 0, true);
  EXPECT_EQ(flags[1].item<double>() != 0, ranks.size() > 1);
  EXPECT_EQ(flags[2].item<double>() != 0, false);
  if (kind == Kind::kAllReduce) { // the same on all ranks
    auto smallest = got.clone();
    ranks.all_reduce(smallest, ReduceOp::kMin, "equal").wait();
    EXPECT_TENSORS_EQUAL(smallest, got);
  }
}

TEST(QuantizedReduction, IsThePlainOneWithinItsBound) {
  auto& ranks = *init_device_mesh(torch::kCPU, {world_size()}, {"all"}).communicator(0);
  for (const auto kind : {Kind::kReduceScatter, Kind::kAllReduce}) {
    for (const auto& codec : kCodecs) {
      for (const int64_t rows : {0, 1, 3, 64, 1001}) {
        for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kHalf, torch::kDouble}) {
          for (const auto op : {ReduceOp::kAvg, ReduceOp::kSum}) expect_plain_mean(ranks, kind, codec, rows, dtype, op);
        }
      }
    }
  }
}

TEST(QuantizedReduction, IsThePlainOneOnEightAndSixteenRanks) {
  if (world_size() > 1) GTEST_SKIP() << "has its own ranks";
  for (const int count : {8, 16}) {
    run_ranks_as_threads(count, [] {
      auto& ranks = *init_device_mesh(torch::kCPU, {world_size()}, {"all"}).communicator(0);
      for (const auto kind : {Kind::kReduceScatter, Kind::kAllReduce}) {
        for (const auto& codec : kCodecs) expect_plain_mean(ranks, kind, codec, 203, torch::kFloat, ReduceOp::kAvg);
      }
    });
  }
}

/// Takes a parameter out of what this rank used: its gradients are zeros.
void leave_out(const Tensor& input, const GradientLayout& layout, size_t parameter) {
  for (size_t c = 0; c < layout.chunks.size(); ++c) {
    for (const auto& piece : layout.chunks[c]) {
      if (piece.parameter == parameter) piece_in(input, layout, c, piece, 0).zero_();
    }
    input[static_cast<int64_t>(c) * layout.chunk_numel + layout.flags + static_cast<int64_t>(parameter)] = 0;
  }
}

/// In each step some ranks leave a parameter out, and in some steps all do.
Tensor gradients_of_step(const GradientLayout& layout, int64_t rank, size_t step) {
  auto input = gradients_of(layout);
  for (size_t p = 0; p < 3; ++p) {
    if (step % 4 == p || (step + p + static_cast<size_t>(rank)) % 3 == 0) leave_out(input, layout, p);
  }
  return input;
}

/// Zeros for the parameters that no rank used, of which a backward leaves the gradients as they are.
Tensor delivered(const Case& each, const Tensor& output) {
  auto result = output.to(torch::kDouble);
  for (const auto& piece : each.layout->chunks[static_cast<size_t>(each.out_first)]) {
    const auto flag = output[each.layout->flags + static_cast<int64_t>(piece.parameter)];
    if (flag.item<double>() == 0) result.narrow(0, piece.offset, piece.numel()).zero_();
  }
  return result;
}

/// What all ranks have sent in several steps, and what they keep, is the sum of their gradients. It is so with parameters that
/// some ranks, or all, do not use in a step.
void expect_nothing_lost(Communicator& ranks, Kind kind, const ReductionPolicy& policy, ReduceOp op,
                         const std::vector<std::string>& residuals, const std::string& result_residual) {
  const auto each = make_case(kind, ranks, 203, torch::kFloat);
  const auto extension = policy.make(each.layout, {each.stage});
  const int64_t numel = each.stage.chunks * each.layout->chunk_numel, chunk = each.layout->chunk_numel;
  auto sum = torch::zeros({numel}, torch::kDouble), sent = torch::zeros({chunk}, torch::kDouble);
  for (int step = 0; step < 20; ++step) {
    const auto input = gradients_of_step(*each.layout, ranks.rank(), static_cast<size_t>(step));
    sent += delivered(each, reduced(*extension, each, op, input));
    sum += input.to(torch::kDouble);
  }
  if (op == ReduceOp::kAvg) sent *= ranks.size();
  sum = sum_over_ranks(ranks, sum.nan_to_num(0)).narrow(0, each.out_first * chunk, chunk);
  for (const auto& [name, tensor] : extension->state()) {
    const double weight = name == result_residual && op == ReduceOp::kAvg ? ranks.size() : 1;
    if (name != result_residual && std::find(residuals.begin(), residuals.end(), name) == residuals.end()) continue;
    const auto kept = sum_over_ranks(ranks, tensor) * weight;
    sent += kept.numel() == chunk ? kept : kept.narrow(0, each.out_first * chunk, chunk);
  }
  const auto got = pieces_of(sent, *each.layout, each.out_first, 1), want = pieces_of(sum, *each.layout, each.out_first, 1);
  EXPECT_TRUE(torch::allclose(got, want, 1e-4, 1e-3)) << (got - want).abs().max();
}

TEST(QuantizedReduction, LosesNothingWithErrorFeedback) {
  auto& ranks = *init_device_mesh(torch::kCPU, {world_size()}, {"all"}).communicator(0);
  for (const auto kind : {Kind::kReduceScatter, Kind::kAllReduce}) {
    for (const auto& codec : kCodecs) {
      for (const auto op : {ReduceOp::kAvg, ReduceOp::kSum}) {
        SCOPED_TRACE(c10::str(to_string(codec.wire), kind == Kind::kAllReduce ? " all-reduce" : " reduce-scatter"));
        const auto policy = quantized_reduction({.codec = codec, .smallest = 0, .error_feedback = true});
        expect_nothing_lost(ranks, kind, *policy, op, {"residual_0"}, "result_residual_0");
      }
    }
  }
}

TEST(PowerSGD, LosesNothing) {
  auto& ranks = *init_device_mesh(torch::kCPU, {world_size()}, {"all"}).communicator(0);
  for (const auto op : {ReduceOp::kAvg, ReduceOp::kSum})
    expect_nothing_lost(ranks, Kind::kAllReduce, *power_sgd({.rank = 1, .start_after = 3}), op, {"error"}, "");
}

TEST(QuantizedReduction, ANumberThatIsNotFiniteArrivesAsOne) {
  auto& ranks = *init_device_mesh(torch::kCPU, {world_size()}, {"all"}).communicator(0);
  for (const auto kind : {Kind::kReduceScatter, Kind::kAllReduce}) {
    for (const auto& codec : kCodecs) {
      for (const double bad : {static_cast<double>(NAN), std::numeric_limits<double>::infinity()}) {
        for (const bool feeds : {false, true}) {
          const auto each = make_case(kind, ranks, 203, torch::kFloat);
          const auto policy = quantized_reduction({.codec = codec, .smallest = 0, .error_feedback = feeds});
          const auto extension = policy->make(each.layout, {each.stage});
          const auto input = gradients_of(*each.layout);
          auto poisoned = input.clone();
          if (ranks.rank() == ranks.size() - 1) piece_in(poisoned, *each.layout, 0, each.layout->chunks[0][0], 0)[2] = bad;
          const auto output = pieces_of(reduced(*extension, each, ReduceOp::kAvg, poisoned), *each.layout, each.out_first, 1);
          if (each.out_first == 0) {
            EXPECT_FALSE(output[2].isfinite().item<bool>()) << to_string(codec.wire);
          }
          const auto next = pieces_of(reduced(*extension, each, ReduceOp::kAvg, input), *each.layout, each.out_first, 1);
          EXPECT_TRUE(next.isfinite().all().item<bool>()) << to_string(codec.wire) << ", the step after it";
        }
      }
    }
  }
}

TEST(PowerSGD, ANumberThatIsNotFiniteArrivesAsOne) {
  auto& ranks = *init_device_mesh(torch::kCPU, {world_size()}, {"all"}).communicator(0);
  const auto each = make_case(Kind::kAllReduce, ranks, 203, torch::kFloat);
  const auto extension = power_sgd({.rank = 1, .start_after = 0})->make(each.layout, {each.stage});
  for (const bool is_bad : {false, true, false, false}) {
    auto input = gradients_of(*each.layout);
    if (is_bad && ranks.rank() == 0) piece_in(input, *each.layout, 0, each.layout->chunks[0][0], 0)[2] = NAN;
    const auto output = pieces_of(reduced(*extension, each, ReduceOp::kAvg, input), *each.layout, 0, 1);
    EXPECT_EQ(output[2].isfinite().item<bool>(), !is_bad);
    EXPECT_EQ(output.isfinite().all().item<bool>(), !is_bad);
  }
}

TEST(QuantizedReduction, KeepsZerosAndTheLargestNumbers) {
  auto& ranks = *init_device_mesh(torch::kCPU, {world_size()}, {"all"}).communicator(0);
  for (const auto kind : {Kind::kReduceScatter, Kind::kAllReduce}) {
    for (const auto& codec : kCodecs) {
      for (const double value : {0., 3e38, -3e38}) {
        const auto each = make_case(kind, ranks, 50, torch::kFloat);
        const auto extension = quantized_reduction({.codec = codec, .smallest = 0})->make(each.layout, {each.stage});
        const auto input = torch::full({each.stage.chunks * each.layout->chunk_numel}, value / ranks.size());
        const auto output = pieces_of(reduced(*extension, each, ReduceOp::kAvg, input), *each.layout, each.out_first, 1);
        EXPECT_TRUE(torch::allclose(output, torch::full_like(output, value / ranks.size()), 1e-4))
            << to_string(codec.wire) << value;
      }
    }
  }
}

/// Of a matrix of low rank nothing is lost, once Q has found its rows.
TEST(PowerSGD, FindsAMatrixOfLowRank) {
  auto& ranks = *init_device_mesh(torch::kCPU, {world_size()}, {"all"}).communicator(0);
  auto layout = std::make_shared<GradientLayout>();
  layout->names = {"w", "b"};
  layout->sizes = {{40, 30}, {16}};
  layout->chunks = {{{0, 0, {40, 30}}, {1, 1200, {16}}}};
  layout->flags = 1216;
  layout->chunk_numel = 1224;
  const ReductionStage stage{.kind = Kind::kAllReduce, .communicator = &ranks};
  const auto extension = power_sgd({.rank = 2, .start_after = 2})->make(layout, {stage});
  torch::manual_seed(5);
  const auto left = torch::randn({40, 2}), right = torch::randn({2, 30});
  for (int step = 0; step < 6; ++step) {
    auto input = torch::ones({1224});
    const auto matrix = torch::mm(left, right) * (1 + ranks.rank()) / ranks.size();
    input.narrow(0, 0, 1200).copy_(matrix.view({-1}));
    input.narrow(0, 1200, 16).fill_(static_cast<double>(ranks.rank()));
    const auto expected = sum_over_ranks(ranks, input) / ranks.size();
    extension->reduce({stage, ReduceOp::kAvg, input, input, "test"}).wait();
    const double left = step < 4 ? 1e-3 : 1e-5; // the first Q may see one of the two directions faintly, and P has fp32's digits
    EXPECT_TRUE(torch::allclose(input.to(torch::kDouble), expected, 1e-4, left))
        << "step " << step << ", " << (input.to(torch::kDouble) - expected).abs().max();
  }
  EXPECT_LT(extension->payload(stage), 1224 * 4 / 4);
}

/// A gradient that is 0 for a while, or of a lower rank, does not end the search.
TEST(PowerSGD, GoesOnAfterZeros) {
  auto& ranks = *init_device_mesh(torch::kCPU, {world_size()}, {"all"}).communicator(0);
  auto layout = std::make_shared<GradientLayout>();
  layout->names = {"w"};
  layout->sizes = {{40, 30}};
  layout->chunks = {{{0, 0, {40, 30}}}};
  layout->flags = 1200;
  layout->chunk_numel = 1208;
  const ReductionStage stage{.kind = Kind::kAllReduce, .communicator = &ranks};
  const auto extension = power_sgd({.rank = 2, .start_after = 0})->make(layout, {stage});
  torch::manual_seed(5);
  const auto matrix = torch::mm(torch::randn({40, 2}), torch::randn({2, 30})).view({-1});
  double left = 0;
  for (int step = 0; step < 12; ++step) {
    auto input = torch::zeros({1208});
    if (step > 3) input.narrow(0, 0, 1200).copy_(matrix);
    extension->reduce({stage, ReduceOp::kAvg, input, input, "test"}).wait();
    left = (input.narrow(0, 0, 1200) - matrix).abs().max().item<double>();
    if (step <= 3) EXPECT_EQ(input.narrow(0, 0, 1200).abs().max().item<double>(), 0);
  }
  EXPECT_LT(left, 1e-3);
}

TEST(ReductionPolicies, RefuseSettingsThatTheyCannotMeet) {
  EXPECT_THROWS_WITH(quantized_reduction({.codec = {Wire::kInt4, 12}}), "quantized_reduction: blocks of 12 numbers");
  EXPECT_THROWS_WITH(quantized_reduction({.inner = BlockCodec{Wire::kInt4, 7}}), "the inner codec: blocks of 7 numbers");
  EXPECT_THROWS_WITH(quantized_reduction({.smallest = -1}), "smallest is -1");
  EXPECT_THROWS_WITH(power_sgd({.rank = 0}), "the rank is 0");
  EXPECT_THROWS_WITH(power_sgd({.start_after = -2}), "start_after is -2");
}

} // namespace
} // namespace tessera::testing::reduction_extension_test
