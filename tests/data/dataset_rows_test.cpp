// Datasets of LibTorch as sources.
#include <tessera/data/dataset_rows.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <thread>

#include <tessera/data/prefetch.h>
#include <tessera/data/row_source.h>

#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::dataset_rows_test {
namespace {

/// Row i is a vector of i with the target 2 i.
class Squares : public torch::data::datasets::Dataset<Squares> {
 public:
  explicit Squares(int64_t rows) : rows_(rows) {}
  torch::data::Example<> get(size_t row) override {
    ++reads_; // no two threads may have one copy
    const auto number = static_cast<int64_t>(row);
    return {torch::full({3}, number, torch::kLong), torch::tensor(2 * number)};
  }
  torch::optional<size_t> size() const override { return static_cast<size_t>(rows_); }

 private:
  int64_t rows_, reads_ = 0;
};

auto squares(int64_t rows) { return DatasetRows(Squares(rows).map(torch::data::transforms::Stack<>())); }
DeviceMesh world_mesh() { return init_device_mesh(torch::kCPU, {world_size()}, {"dp"}); }

TEST(DatasetRows, GivesWhatLibTorchsLoaderGives) {
  constexpr int64_t kRows = 23, kBatch = 4;
  RowSource source(squares(kRows), world_mesh(), {.batch = kBatch, .seed = 3});
  DistributedSampler sampler(kRows, world_mesh(), {.seed = 3});
  for (int64_t epoch = 0; epoch < 2; ++epoch) {
    sampler.set_epoch(epoch);
    const auto loader = torch::data::make_data_loader(Squares(kRows).map(torch::data::transforms::Stack<>()), sampler, kBatch);
    for (const auto& expected : *loader) {
      const auto batch = source.next();
      ASSERT_TRUE(batch);
      EXPECT_TENSORS_EQUAL(batch->data, expected.data);
      EXPECT_TENSORS_EQUAL(batch->target, expected.target);
    }
    EXPECT_FALSE(source.next());
  }
}

TEST(DatasetRows, IsReadBySeveralThreadsInCopies) {
  RowSource plain(squares(100), world_mesh(), {.batch = 3, .seed = 3});
  auto ahead = prefetch(RowSource(squares(100), world_mesh(), {.batch = 3, .seed = 3}), {.depth = 5, .workers = 3});
  for (auto expected = plain.next(); expected; expected = plain.next()) {
    const auto batch = ahead.next();
    ASSERT_TRUE(batch);
    EXPECT_TENSORS_EQUAL(batch->data, expected->data);
  }
  EXPECT_FALSE(ahead.next());
}

/// Knows no size, as a stream.
class Endless : public torch::data::datasets::Dataset<Endless> {
 public:
  torch::data::Example<> get(size_t) override { return {}; }
  torch::optional<size_t> size() const override { return {}; }
};

TEST(DatasetRows, NamesADatasetWithoutASize) {
  EXPECT_THROWS_WITH(DatasetRows<Endless>(Endless{}), "the dataset does not know its size");
}

} // namespace
} // namespace tessera::testing::dataset_rows_test
