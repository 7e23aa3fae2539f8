// Rows of tokens and how documents are packed into them, beside a slow reference.
#include <tessera/data/token_rows.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <optional>

#include <tessera/data/prefetch.h>

#include <tessera/tests/support/draw.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/temporary_folder.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::token_rows_test {
namespace {

using Tokens = std::vector<int64_t>;
using Documents = std::vector<Tokens>;

/// Token i of all documents is i, so that a test sees where each comes from.
Documents draw_documents(Draw& draw) {
  Documents documents(static_cast<size_t>(1 + draw.below(12)));
  int64_t token = 0;
  for (auto& document : documents) {
    const auto length = draw.chance(15) ? 0 : 1 + draw.below(draw.chance(30) ? 40 : 9);
    for (int64_t i = 0; i < length; ++i) document.push_back(token++);
  }
  documents.back().push_back(token++);
  documents.back().push_back(token);
  return documents;
}

TokenFile write_tokens(const TemporaryFolder& folder, const Documents& documents, const std::string& name = "tokens.bin") {
  TokenFileWriter writer(folder.file(name), 1000);
  for (const auto& document : documents) writer.add(document);
  writer.finish();
  return TokenFile(folder.file(name));
}

/// One token of a row.
struct Place {
  int64_t input, target, segment; ///< segments are numbered over all rows
};
using Row = std::vector<Place>;

Place padding(const TokenRowOptions& options, int64_t segment) { return {options.padding, TokenBatch::kIgnored, segment}; }

void fill(std::vector<Row>& rows, const TokenRowOptions& options, int64_t& segment) {
  ++segment;
  while (std::ssize(rows.back()) < options.sequence) rows.back().push_back(padding(options, segment));
}

/// Token by token.
std::vector<Row> stream_rows(const Documents& documents, const TokenRowOptions& options) {
  std::vector<Place> all;
  int64_t number = 0;
  for (const auto& document : documents) {
    for (size_t i = 0; i < document.size(); ++i) {
      const bool is_ignored = i + 1 == document.size() && options.document_ends == DocumentEnds::kIgnore;
      all.push_back({document[i], is_ignored ? TokenBatch::kIgnored : document[i] + 1, number});
    }
    ++number;
  }
  const auto with_target = std::ssize(all) - 1;
  all.back().target = TokenBatch::kIgnored;
  std::vector<Row> rows;
  int64_t segment = 0, document = -1;
  for (int64_t i = 0; i < std::ssize(all); ++i) {
    const bool begins_row = i % options.sequence == 0, pads = options.last_tokens == LastTokens::kPad;
    if (begins_row && (pads ? i >= with_target : i + options.sequence > with_target)) break;
    if (begins_row) rows.emplace_back();
    const bool begins_document = all[static_cast<size_t>(i)].segment != document;
    if (begins_row || begins_document) ++segment;
    document = all[static_cast<size_t>(i)].segment;
    auto place = all[static_cast<size_t>(i)];
    place.segment = segment;
    rows.back().push_back(place);
  }
  if (!rows.empty() && std::ssize(rows.back()) < options.sequence) fill(rows, options, segment);
  return rows;
}

std::vector<Row> whole_document_rows(const Documents& documents, const TokenRowOptions& options) {
  std::vector<Row> rows;
  int64_t segment = 0;
  for (const auto& document : documents) {
    for (size_t begin = 0; begin < document.size(); begin += static_cast<size_t>(options.sequence)) {
      const auto end = std::min(document.size(), begin + static_cast<size_t>(options.sequence));
      const auto room = rows.empty() ? 0 : options.sequence - std::ssize(rows.back());
      if (static_cast<int64_t>(end - begin) > room) {
        if (room > 0) fill(rows, options, segment);
        rows.emplace_back();
      }
      ++segment;
      for (auto i = begin; i < end; ++i) {
        rows.back().push_back({document[i], i + 1 < document.size() ? document[i + 1] : TokenBatch::kIgnored, segment});
      }
    }
  }
  if (std::ssize(rows.back()) < options.sequence) fill(rows, options, segment);
  return rows;
}

std::vector<Row> reference_rows(const Documents& documents, const TokenRowOptions& options) {
  return options.packing == Packing::kWholeDocuments ? whole_document_rows(documents, options) : stream_rows(documents, options);
}

/// What a batch of the chosen rows must be.
void expect_rows(const TokenBatch& batch, const std::vector<Row>& rows, const TokenRowOptions& options) {
  Tokens inputs, targets, positions, cu_seqlens, lengths;
  double counted = 0;
  for (const auto& row : rows) {
    ASSERT_EQ(std::ssize(row), options.sequence);
    int64_t before = -1;
    for (const auto& place : row) {
      inputs.push_back(place.input);
      targets.push_back(place.target);
      counted += place.target == TokenBatch::kIgnored ? 0 : 1;
      if (place.segment != before) {
        cu_seqlens.push_back(std::ssize(inputs) - 1);
        lengths.push_back(0);
      }
      positions.push_back(lengths.back()++);
      before = place.segment;
    }
  }
  cu_seqlens.push_back(std::ssize(inputs));
  EXPECT_TENSORS_EQUAL(batch.inputs, torch::tensor(inputs).view({-1, options.sequence}));
  EXPECT_TENSORS_EQUAL(batch.targets, torch::tensor(targets).view({-1, options.sequence}));
  EXPECT_EQ(batch.counted(), counted);
  ASSERT_EQ(batch.cu_seqlens.defined(), options.packing != Packing::kStream);
  ASSERT_EQ(batch.positions.defined(), options.packing != Packing::kStream);
  if (options.packing == Packing::kStream) {
    EXPECT_EQ(batch.max_seqlen, options.sequence);
    return;
  }
  EXPECT_TENSORS_EQUAL(batch.cu_seqlens, torch::tensor(cu_seqlens, torch::kInt));
  EXPECT_TENSORS_EQUAL(batch.positions, torch::tensor(positions).view({-1, options.sequence}));
  EXPECT_EQ(batch.max_seqlen, *std::max_element(lengths.begin(), lengths.end()));
}

std::vector<TokenRowOptions> all_options() {
  std::vector<TokenRowOptions> all;
  for (const int64_t sequence : {1, 2, 5, 8, 17, 64}) {
    for (const auto last : {LastTokens::kDrop, LastTokens::kPad}) {
      for (const auto ends : {DocumentEnds::kIgnore, DocumentEnds::kPredict}) {
        for (const auto packing : {Packing::kStream, Packing::kDocuments}) all.push_back({sequence, packing, ends, last, 999});
      }
    }
    all.push_back({sequence, Packing::kWholeDocuments, DocumentEnds::kIgnore, LastTokens::kDrop, 999});
  }
  return all;
}

TEST(TokenRows, PacksAsTheSlowReference) {
  const TemporaryFolder folder;
  Draw draw(test_seed());
  for (int i = 0; i < 25; ++i) {
    const auto documents = draw_documents(draw);
    const auto file = write_tokens(folder, documents);
    for (const auto& options : sweep(all_options(), 8)) {
      SCOPED_TRACE(c10::str("rows of ", options.sequence, ", packing ", static_cast<int>(options.packing)));
      const auto expected = reference_rows(documents, options);
      if (expected.empty()) {
        EXPECT_THROWS_WITH(TokenRows(file, options), "tokens are too few for a row of");
        continue;
      }
      const TokenRows rows(file, options);
      ASSERT_EQ(rows.size(), std::ssize(expected));
      std::vector<size_t> chosen;
      std::vector<Row> of_chosen;
      for (auto left = 1 + draw.below(5); left > 0; --left) {
        chosen.push_back(static_cast<size_t>(draw.below(rows.size())));
        of_chosen.push_back(expected[chosen.back()]);
      }
      expect_rows(rows.get(chosen), of_chosen, options);
    }
  }
}

/// Every token but a document's first is predicted exactly once.
TEST(TokenRows, PredictEveryTokenOfAnEvaluationOnce) {
  const TemporaryFolder folder;
  Draw draw(test_seed());
  for (const auto packing : {Packing::kStream, Packing::kDocuments, Packing::kWholeDocuments}) {
    for (int i = 0; i < 10; ++i) {
      const auto documents = draw_documents(draw);
      const auto file = write_tokens(folder, documents);
      Tokens expected, predicted;
      for (const auto& document : documents) {
        for (size_t j = 1; j < document.size(); ++j) expected.push_back(document[j]);
      }
      const TokenRows rows(file, {.sequence = 7, .packing = packing, .last_tokens = LastTokens::kPad});
      for (int64_t row = 0; row < rows.size(); ++row) {
        const auto targets = rows.get({static_cast<size_t>(row)}).targets.view(-1).contiguous();
        for (int64_t j = 0; j < targets.numel(); ++j) {
          if (const auto target = targets[j].item<int64_t>(); target != TokenBatch::kIgnored) predicted.push_back(target);
        }
      }
      EXPECT_EQ(predicted, expected);
    }
  }
}

TEST(TokenRows, AreASourceThatRanksShare) {
  const TemporaryFolder folder;
  Documents documents(1);
  for (int64_t i = 0; i < 200; ++i) documents[0].push_back(i);
  write_tokens(folder, documents);
  const auto mesh = init_device_mesh(torch::kCPU, {world_size()}, {"dp"});
  auto source = token_source(folder.file("tokens.bin"), {.sequence = 8}, mesh, {.batch = 2, .shuffle = false});
  DataSource<TokenBatch> ahead = prefetch(std::move(source), {.depth = 3, .workers = 2});
  const auto batch = ahead.next();
  ASSERT_TRUE(batch);
  EXPECT_TENSORS_EQUAL(batch->inputs[0], torch::arange(8) + 8 * world_rank());
  EXPECT_TENSORS_EQUAL(batch->inputs[1], torch::arange(8) + 8 * (world_rank() + world_size()));
  EXPECT_TENSORS_EQUAL(batch->targets, batch->inputs + 1);
  EXPECT_EQ(ahead.position(), (DataPosition{0, 2 * world_size()}));
  EXPECT_EQ(batch->counted(), 16);
  EXPECT_TENSORS_EQUAL(batch->to(torch::kCPU).targets, batch->targets);
}

TEST(TokenRows, FollowEachOtherFromFileToFile) {
  const TemporaryFolder folder;
  const auto first = write_tokens(folder, {{1, 2, 3, 4, 5, 6, 7}}, "first.bin");
  const auto second = write_tokens(folder, {{10, 11, 12}}, "second.bin");
  const TokenRows rows(std::vector{first, second}, {.sequence = 2});
  ASSERT_EQ(rows.size(), 4);
  const auto batch = rows.get({3, 2, 0});
  EXPECT_TENSORS_EQUAL(batch.inputs, torch::tensor({{10, 11}, {5, 6}, {1, 2}}, torch::kLong));
  EXPECT_TENSORS_EQUAL(batch.targets, torch::tensor({{11, 12}, {6, 7}, {2, 3}}, torch::kLong));
  EXPECT_THROWS_WITH(TokenRows(std::vector{first, second}, {.sequence = 3}),
                     "second.bin: its 3 tokens are too few for a row of 3");
  EXPECT_THROWS_WITH(TokenRows(std::vector<TokenFile>(), {}), "there are no files");
  const TokenFile smaller(folder.file("second.bin"), {.vocabulary = 20});
  EXPECT_THROWS_WITH(TokenRows(std::vector{first, smaller}, {.sequence = 2}),
                     "first.bin has a vocabulary of 1000 ids, and " + smaller.path() + " one of 20");
}

TEST(TokenRows, NameWhatIsWrong) {
  const TemporaryFolder folder;
  const auto file = write_tokens(folder, {{1, 2, 3, 4, 5}});
  EXPECT_THROWS_WITH(TokenRows(file, {.sequence = 0}), "a sequence of 0 tokens");
  EXPECT_THROWS_WITH(TokenRows(file, {.sequence = 5}), "its 5 tokens are too few for a row of 5 and its last target");
  EXPECT_EQ(TokenRows(file, {.sequence = 4}).size(), 1);
  EXPECT_EQ(TokenRows(file, {.sequence = 100, .last_tokens = LastTokens::kPad}).size(), 1);
  EXPECT_THROWS_WITH(TokenRows(file, {.sequence = 2, .padding = 1000}), "the padding 1000 is not in the vocabulary of 1000 ids");
  EXPECT_THROWS_WITH(
      TokenRows(file, {.sequence = 2, .packing = Packing::kWholeDocuments, .document_ends = DocumentEnds::kPredict}),
      "a document's last token has no next one to predict");
  EXPECT_THROWS_WITH(TokenRows(file, {.sequence = 2}).get({2}), "row 2 of 2");
  const TokenRows long_rows(file, {.sequence = 1 << 20, .last_tokens = LastTokens::kPad});
  EXPECT_THROWS_WITH(long_rows.get(std::vector<size_t>(2048)), "a batch of 2048 rows of 1048576 tokens is too large");
}

} // namespace
} // namespace tessera::testing::token_rows_test
