#include <tessera/parallel/context/attention_blocks.h>

#include <algorithm>

namespace tessera::internal {

namespace {

PositionRange common(const PositionRange& a, const PositionRange& b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

void add(const AttentionBlock& block, std::vector<AttentionBlock>& blocks) {
  if (block.query.size() > 0 && block.key.size() > 0) blocks.push_back(block);
}

/// Adds the blocks of one document.
void add_blocks(const PositionRange& query, const PositionRange& key, bool is_causal, std::vector<AttentionBlock>& blocks) {
  if (!is_causal) return add({query, key}, blocks);
  add({query, {key.begin, std::min(key.end, query.begin)}}, blocks);
  const auto both = common(query, key);
  if (both.size() <= 0) return;
  add({both, both, /*is_causal=*/true}, blocks);
  add({{both.end, query.end}, both}, blocks);
}

} // namespace

std::vector<AttentionBlock> blocks_between(const PositionRange& query, const PositionRange& key, bool is_causal,
                                           const std::vector<int64_t>& documents) {
  std::vector<AttentionBlock> blocks;
  if (documents.empty()) add_blocks(query, key, is_causal, blocks);
  for (size_t i = 0; i + 1 < documents.size(); ++i) {
    const PositionRange document{documents[i], documents[i + 1]};
    const auto queries = common(query, document), keys = common(key, document);
    if (queries.size() > 0 && keys.size() > 0) add_blocks(queries, keys, is_causal, blocks);
  }
  return blocks;
}

} // namespace tessera::internal
