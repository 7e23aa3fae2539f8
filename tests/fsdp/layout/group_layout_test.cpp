#include <tessera/dtensor/layout/sharding_math.h>
#include <tessera/fsdp/layout/group_layout.h>

#include <gtest/gtest.h>

#include <random>

#include <tessera/tests/support/matchers.h>

namespace tessera::internal::group_layout_test {
namespace {

std::vector<ParameterShape> random_parameters(std::mt19937& random) {
  const auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  std::vector<ParameterShape> parameters(static_cast<size_t>(pick(1, 8)));
  for (size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].name = "p" + std::to_string(i);
    for (int dims = pick(0, 3); dims > 0; --dims) parameters[i].sizes.push_back(pick(0, 9) == 0 ? pick(0, 1) : pick(1, 40));
    parameters[i].unsharded_dtype =
        std::vector{c10::kFloat, c10::kBFloat16, c10::kLong, c10::kBool}[static_cast<size_t>(pick(0, 3))];
  }
  return parameters;
}

int64_t item(const ParameterShape& parameter) { return static_cast<int64_t>(c10::elementSize(parameter.unsharded_dtype)); }

int64_t unit_numel(const ParameterShape& parameter, const Placement& placement) {
  const auto dim =
      std::holds_alternative<RaggedShard>(placement) ? std::get<RaggedShard>(placement).dim : std::get<Shard>(placement).dim;
  int64_t numel = 1;
  for (size_t d = static_cast<size_t>(dim) + 1; d < parameter.sizes.size(); ++d) numel *= parameter.sizes[d];
  return numel;
}

void expect_valid(const GroupLayout& layout, const std::vector<ParameterShape>& parameters, int ranks) {
  ASSERT_EQ(layout.parameters.size(), parameters.size());
  std::vector<std::vector<bool>> taken(static_cast<size_t>(ranks), std::vector<bool>(static_cast<size_t>(layout.shard_bytes)));
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& one = layout.parameters[i];
    if (one.is_replicated()) {
      EXPECT_TRUE(parameters[i].sizes.empty());
      for (const auto& piece : one.pieces.expanded()) EXPECT_EQ(piece.numel, 1);
      continue;
    }
    int64_t end = 0;
    for (size_t rank = 0; rank < static_cast<size_t>(ranks); ++rank) {
      const auto& piece = one.pieces[rank];
      EXPECT_EQ(piece.begin, end) << "pieces are contiguous, in rank order";
      end += piece.numel;
      EXPECT_EQ(piece.shard_offset % item(parameters[i]), 0);
      for (int64_t byte = 0; byte < piece.numel * item(parameters[i]); ++byte) {
        ASSERT_LT(piece.shard_offset + byte, layout.shard_bytes);
        auto&& used = taken[rank][static_cast<size_t>(piece.shard_offset + byte)];
        ASSERT_FALSE(used) << "two parameters share a byte of the shard";
        used = true;
      }
      if (const auto* ragged = std::get_if<RaggedShard>(&one.placement)) {
        EXPECT_EQ(ragged->extents[rank] * unit_numel(parameters[i], one.placement), piece.numel);
      }
    }
    EXPECT_EQ(end, parameters[i].numel());
    EXPECT_EQ(one.unsharded_offset % kParameterAlignment, 0);
    EXPECT_LE(one.unsharded_offset + end * item(parameters[i]), layout.unsharded_bytes);
  }
}

/// The shapes on the `part`-th of the ranks that split dim `split[i]` of parameter i, where it has that many dims.
std::vector<ParameterShape> parts_of(std::vector<ParameterShape> parameters, const std::vector<size_t>& split, int64_t parts,
                                     int64_t part) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto& sizes = parameters[i].sizes;
    if (split[i] >= sizes.size()) continue;
    LargestPart largest{sizes};
    auto& size = sizes[split[i]];
    largest.sizes[split[i]] = chunk_extent(size, parts, 0).size;
    if (size % parts != 0) largest.last_uneven = split[i];
    size = chunk_extent(size, parts, part).size;
    parameters[i].largest = largest;
  }
  return parameters;
}

TEST(GroupLayout, PartsOfOneTensorAreCutAtTheSamePlaces) {
  std::mt19937 random(9);
  for (int trial = 0; trial < 300; ++trial) {
    const auto parameters = random_parameters(random);
    std::vector<size_t> split;
    for (size_t i = 0; i < parameters.size(); ++i) split.push_back(random() % 4);
    for (const int64_t parts : {2, 3, 4}) {
      for (const int ranks : {1, 2, 3, 5}) {
        SCOPED_TRACE("trial " + std::to_string(trial) + ", parts " + std::to_string(parts) + ", ranks " + std::to_string(ranks));
        const auto first = plan_ragged(parts_of(parameters, split, parts, 0), ranks);
        for (int64_t part = 0; part < parts; ++part) {
          const auto shapes = parts_of(parameters, split, parts, part);
          const auto layout = plan_ragged(shapes, ranks);
          EXPECT_EQ(layout.shard_bytes, first.shard_bytes);
          EXPECT_EQ(layout.unsharded_bytes, first.unsharded_bytes);
          EXPECT_TRUE(layout.gathers_in_place);
          for (size_t i = 0; i < shapes.size(); ++i) {
            const auto &one = layout.parameters[i], &largest = first.parameters[i];
            EXPECT_EQ(one.unsharded_offset, largest.unsharded_offset);
            EXPECT_EQ(one.placement, largest.placement);
            if (one.is_replicated()) continue;
            const auto mine = cut_at(std::get<RaggedShard>(one.placement), shapes[i].sizes);
            int64_t end = 0;
            for (size_t rank = 0; rank < static_cast<size_t>(ranks); ++rank) {
              const auto piece = one.pieces[rank];
              EXPECT_EQ(piece.numel, mine.extents[rank] * unit_numel(shapes[i], one.placement));
              if (piece.numel == 0) continue;
              EXPECT_EQ(piece.begin, end);
              EXPECT_EQ(static_cast<int64_t>(rank) * layout.shard_bytes + piece.shard_offset,
                        one.unsharded_offset + piece.begin * item(shapes[i]));
              end += piece.numel;
            }
            EXPECT_EQ(end, shapes[i].numel());
          }
        }
      }
    }
  }
}

TEST(GroupLayout, RandomGroupsAreCutCompletelyAndWithoutOverlap) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 300; ++trial) {
    const auto parameters = random_parameters(random);
    for (const int ranks : {1, 2, 3, 4, 7}) {
      SCOPED_TRACE("trial " + std::to_string(trial) + ", ranks " + std::to_string(ranks));
      const auto ragged = plan_ragged(parameters, ranks);
      expect_valid(ragged, parameters, ranks);
      EXPECT_TRUE(ragged.gathers_in_place);
      EXPECT_EQ(ragged.unsharded_bytes, ragged.shard_bytes * ranks + ragged.replicated_bytes);
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (ragged.parameters[i].is_replicated()) continue;
        for (int rank = 0; rank < ranks; ++rank) {
          const auto& piece = ragged.parameters[i].pieces[static_cast<size_t>(rank)];
          if (piece.numel == 0) continue;
          EXPECT_EQ(rank * ragged.shard_bytes + piece.shard_offset,
                    ragged.parameters[i].unsharded_offset + piece.begin * item(parameters[i]))
              << "the all-gather's output is the unsharded storage";
        }
      }
      const auto per_parameter = plan_per_parameter(parameters, ranks);
      expect_valid(per_parameter, parameters, ranks);
      EXPECT_EQ(per_parameter.gathers_in_place, ranks == 1);
    }
  }
}

TEST(GroupLayout, TransformerBlocksAreCutBetweenRowsWithinOnePercent) {
  const std::vector<ParameterShape> block{{"norm.weight", {512}, c10::kFloat},       {"norm.bias", {512}, c10::kFloat},
                                          {"qkv.weight", {1536, 512}, c10::kFloat},  {"qkv.bias", {1536}, c10::kFloat},
                                          {"up.weight", {2048, 512}, c10::kFloat},   {"up.bias", {2048}, c10::kFloat},
                                          {"down.weight", {512, 2048}, c10::kFloat}, {"down.bias", {512}, c10::kFloat}};
  int64_t bytes = 0;
  for (const auto& parameter : block) bytes += parameter.numel() * 4;
  for (const int ranks : {2, 3, 4, 5, 8}) {
    const auto layout = plan_ragged(block, ranks);
    EXPECT_LE(layout.unsharded_bytes, bytes + bytes / 100);
    for (const auto& parameter : layout.parameters) EXPECT_EQ(std::get<RaggedShard>(parameter.placement).dim, 0);
  }
}

TEST(GroupLayout, SizesThatOverflowAreAnErrorWithTheName) {
  constexpr int64_t kHuge = int64_t{1} << 56;
  const std::vector<std::vector<int64_t>> huge{{8 * kHuge},    {kHuge + 1},           {kHuge / 2, 3},
                                               {3, kHuge / 2}, {kHuge, kHuge, kHuge}, {1, kHuge / 4 + 1}};
  for (const auto kind : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
    for (const auto& sizes : huge) {
      const auto message = testing::error_of([&] { plan_layout(kind, {{"a", {3}}, {"net.huge", sizes}}, 4); });
      EXPECT_NE(message.find("with the parameter net.huge of shape ["), std::string::npos) << message;
    }
    const auto message = testing::error_of([&] {
      plan_layout(kind, {{"a", {kHuge / 2}}, {"b", {kHuge / 4, 2}}, {"c", {4}}}, 4);
    });
    EXPECT_NE(message.find("with the parameter c of shape [4] its group has more than 2^56 elements"), std::string::npos)
        << message;
  }
}

TEST(GroupLayout, TheLargestSizesAreCutAtOnce) {
  constexpr int64_t kLarge = int64_t{1} << 52;
  const std::vector<ParameterShape> parameters{{"flat", {kLarge}, c10::kComplexDouble},
                                               {"rows", {7, kLarge / 7}, c10::kComplexDouble},
                                               {"odd", {kLarge / 1001, 1001}, c10::kDouble},
                                               {"wide", {1023, kLarge / 1025}, c10::kFloat}};
  for (const auto kind : {BufferLayout::kRagged, BufferLayout::kPerParameter}) {
    for (const int ranks : {1, 2, 3, 4}) {
      const auto layout = plan_layout(kind, parameters, ranks);
      for (size_t i = 0; i < parameters.size(); ++i) {
        const auto last = layout.parameters[i].pieces.expanded().back();
        EXPECT_EQ(last.begin + last.numel, parameters[i].numel());
        EXPECT_LE(last.shard_offset + last.numel * item(parameters[i]), layout.shard_bytes);
        EXPECT_LE(layout.parameters[i].unsharded_offset + parameters[i].numel() * item(parameters[i]), layout.unsharded_bytes);
      }
    }
  }
}

TEST(GroupLayout, RowLargerThanAShardIsCutInside) {
  const auto layout = plan_ragged({{"wide", {1, 1000}, c10::kFloat}}, 4);
  const auto& placement = std::get<RaggedShard>(layout.parameters[0].placement);
  EXPECT_EQ(placement.dim, 1);
  EXPECT_EQ(placement.extents, (std::vector<int64_t>{252, 252, 252, 244}));
}

TEST(GroupLayout, PerParameterFollowsTorchChunk) {
  const auto layout = plan_per_parameter({{"p", {5, 3}, c10::kFloat}}, 4);
  std::vector<int64_t> rows;
  for (const auto& piece : layout.parameters[0].pieces.expanded()) rows.push_back(piece.numel / 3);
  EXPECT_EQ(rows, (std::vector<int64_t>{2, 2, 1, 0}));
  EXPECT_EQ(layout.parameters[0].placement, Placement(Shard{0}));
}

TEST(ReduceLayout, HoldsThePiecesAndOneFlagAParameter) {
  const std::vector<ParameterShape> parameters{{"a", {7, 3}, c10::kFloat}, {"b", {}, c10::kFloat}, {"c", {5}, c10::kFloat}};
  for (const int ranks : {1, 2, 3, 4}) {
    const auto layout = plan_ragged(parameters, ranks);
    const auto reduce = plan_reduce(layout, {true, false, true});
    EXPECT_TRUE(reduce.offsets[1].empty());
    EXPECT_GE(reduce.chunk_numel, reduce.used_offset + 3);
    for (int rank = 0; rank < ranks; ++rank) {
      const auto r = static_cast<size_t>(rank);
      EXPECT_GE(reduce.offsets[2][r], reduce.offsets[0][r] + layout.parameters[0].pieces[r].numel);
      EXPECT_GE(reduce.used_offset, reduce.offsets[2][r] + layout.parameters[2].pieces[r].numel);
    }
  }
}

} // namespace
} // namespace tessera::internal::group_layout_test
