#include "gpt/text.h"

#include "common/files.h"

namespace gpt {
namespace {

constexpr uint64_t kTrainingStream = 0, kValidationStream = 1;

torch::Tensor read_bytes(const std::string& path) {
  auto content = examples::read_file(path, "the data file", "scripts/setup makes .data/text.txt");
  return torch::from_blob(content.data(), {static_cast<int64_t>(content.size())}, torch::kUInt8).clone();
}

// SplitMix64's output function: a good hash of a counter.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

} // namespace

Text::Text(const std::string& path, int64_t sequence, uint64_t seed)
    : bytes_(read_bytes(path)), sequence_(sequence), seed_(seed) {
  const auto validation_size = bytes_.numel() / 20;
  TORCH_CHECK(validation_size > sequence, "the data file ", path, " has ", bytes_.numel(), " bytes; with --sequence ", sequence,
              " it needs at least ", 20 * (sequence + 1), " (a twentieth of it is for validation)");
  training_ = bytes_.narrow(0, 0, bytes_.numel() - validation_size);
  validation_ = bytes_.narrow(0, bytes_.numel() - validation_size, validation_size);
}

Batch Text::training_batch(int64_t step, int64_t first_row, int64_t rows) const {
  return draw(training_, kTrainingStream, step, first_row, rows);
}

Batch Text::validation_batch(int64_t index, int64_t first_row, int64_t rows) const {
  return draw(validation_, kValidationStream, index, first_row, rows);
}

Batch Text::draw(const torch::Tensor& part, uint64_t stream, int64_t step, int64_t first_row, int64_t rows) const {
  auto windows = torch::empty({rows, sequence_ + 1}, torch::kLong);
  const auto starts = static_cast<uint64_t>(part.numel() - sequence_);
  for (int64_t row = 0; row < rows; ++row) {
    const auto place = mix(mix(mix(seed_ * 2 + stream) ^ static_cast<uint64_t>(step)) ^ static_cast<uint64_t>(first_row + row));
    windows[row].copy_(part.narrow(0, static_cast<int64_t>(place % starts), sequence_ + 1));
  }
  return {windows.narrow(1, 0, sequence_), windows.narrow(1, 1, sequence_)};
}

double Text::unigram_entropy() const {
  const auto frequency = torch::bincount(bytes_).to(torch::kDouble) / static_cast<double>(bytes_.numel());
  return -torch::xlogy(frequency, frequency).sum().item<double>();
}

torch::Tensor Text::prompt(int64_t length) const { return validation_.narrow(0, 0, std::min(length, validation_.numel())); }

} // namespace gpt
