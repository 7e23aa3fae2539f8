#include <gtest/gtest.h>

#include <tessera/parallel/context/attention_blocks.h>

namespace tessera::testing::attention_blocks_test {
namespace {

using internal::AttentionBlock, internal::blocks_between, internal::PositionRange;

/// How often each query sees each key by the blocks.
std::vector<std::vector<int>> seen(const std::vector<AttentionBlock>& blocks, int64_t length) {
  std::vector<std::vector<int>> count(static_cast<size_t>(length), std::vector<int>(static_cast<size_t>(length)));
  for (const auto& block : blocks) {
    EXPECT_TRUE(block.query.size() > 0 && block.key.size() > 0);
    if (block.is_causal) EXPECT_EQ(block.query, block.key);
    for (auto i = block.query.begin; i < block.query.end; ++i) {
      for (auto j = block.key.begin; j < block.key.end; ++j)
        if (!block.is_causal || j <= i) ++count[static_cast<size_t>(i)][static_cast<size_t>(j)];
    }
  }
  return count;
}

int64_t document_of(int64_t position, const std::vector<int64_t>& documents) {
  int64_t document = 0;
  while (document + 1 < static_cast<int64_t>(documents.size()) && documents[static_cast<size_t>(document + 1)] <= position)
    ++document;
  return document;
}

TEST(AttentionBlocks, CoverEachPairOnce) {
  constexpr int64_t kLength = 9;
  const std::vector<std::vector<int64_t>> cuts{{}, {0, 9}, {0, 4, 9}, {0, 1, 1, 6, 9}};
  for (const auto& documents : cuts) {
    for (const bool is_causal : {false, true}) {
      for (int64_t a = 0; a < kLength; ++a) {
        for (int64_t b = a; b <= kLength; ++b) {
          for (const auto& [c, d] : {std::pair<int64_t, int64_t>{0, 9}, {a, b}, {3, 7}, {5, 5}}) {
            const PositionRange query{a, b}, key{c, d};
            const auto count = seen(blocks_between(query, key, is_causal, documents), kLength);
            for (int64_t i = 0; i < kLength; ++i) {
              for (int64_t j = 0; j < kLength; ++j) {
                const bool sees = i >= a && i < b && j >= c && j < d && (!is_causal || j <= i) &&
                                  document_of(i, documents) == document_of(j, documents);
                ASSERT_EQ(count[static_cast<size_t>(i)][static_cast<size_t>(j)], sees) << i << ", " << j;
              }
            }
          }
        }
      }
    }
  }
}

} // namespace
} // namespace tessera::testing::attention_blocks_test
