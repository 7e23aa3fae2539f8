#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "common/files.h"

namespace resnet {

/// Images [1, 8, 8] of handwritten digits in [0, 1], and which digit each one is.
class Digits : public torch::data::datasets::Dataset<Digits> {
 public:
  enum class Part { kTraining, kTest }; ///< the test is the last fifth of the lines

  /// Reads `path`, a line for each image: 64 numbers from 0 to 16, and the digit.
  Digits(const std::string& path, Part part, torch::Dtype dtype) {
    auto text = examples::read_file(path, "the file of images", "`scripts/setup --digits` makes .data/digits.csv");
    std::replace(text.begin(), text.end(), ',', ' ');
    std::istringstream stream(text);
    const std::vector<double> numbers(std::istream_iterator<double>(stream), {});
    TORCH_CHECK(stream.eof() && !numbers.empty() && numbers.size() % 65 == 0, path, " has other lines than of 65 numbers");
    auto lines = torch::tensor(numbers, torch::kDouble).view({-1, 65});
    const auto test = lines.size(0) / 5, training = lines.size(0) - test;
    lines = part == Part::kTest ? lines.narrow(0, training, test) : lines.narrow(0, 0, training);
    images_ = (lines.narrow(1, 0, 64) / 16).to(dtype).view({-1, 1, 8, 8});
    targets_ = lines.select(1, 64).to(torch::kLong);
  }

  torch::data::Example<> get(size_t index) override {
    return {images_[static_cast<int64_t>(index)], targets_[static_cast<int64_t>(index)]};
  }
  torch::optional<size_t> size() const override { return static_cast<size_t>(rows()); }
  int64_t rows() const { return targets_.size(0); }

 private:
  torch::Tensor images_, targets_;
};

} // namespace resnet
