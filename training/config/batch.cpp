#include <tessera/training/config/batch.h>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <vector>

namespace tessera::internal {

namespace {

constexpr auto *kTrain = "train_batch_size", *kMicro = "train_micro_batch_size_per_gpu", *kSteps = "gradient_accumulation_steps";

/// The nearest multiples of `step`, below and above, as "4 or 8".
std::string multiples_near(int64_t number, int64_t step) {
  const auto below = number / step * step;
  return below > 0 && below != number ? fmt::format("{} or {}", below, below + step) : std::to_string(below + step);
}

/// The divisors of `number` that are nearest to `wanted`, as "3, 4 or 6".
std::string divisors_near(int64_t number, int64_t wanted) {
  constexpr size_t kShown = 3;
  std::vector<int64_t> divisors;
  for (int64_t i = 1; i * i <= number; ++i) {
    if (number % i != 0) continue;
    divisors.push_back(i);
    if (i * i != number) divisors.push_back(number / i);
  }
  const auto distance = [&](int64_t each) { return std::abs(each - wanted); };
  std::sort(divisors.begin(), divisors.end(),
            [&](int64_t a, int64_t b) { return distance(a) < distance(b) || (distance(a) == distance(b) && a < b); });
  divisors.resize(std::min(divisors.size(), kShown));
  std::sort(divisors.begin(), divisors.end());
  std::string text;
  for (size_t i = 0; i < divisors.size(); ++i) {
    const auto* separator = i == 0 ? "" : i + 1 == divisors.size() ? " or " : ", ";
    text += separator + std::to_string(divisors[i]);
  }
  return text;
}

void check_positive(const char* name, const std::optional<int64_t>& value, const std::string& source) {
  TORCH_CHECK_VALUE(!value || *value > 0, source, ": ", name, " is ", value.value_or(0), ", but must be positive");
}

/// What would fit in place of one of the numbers.
std::string proposals(const GivenBatch& given, const BatchConfig& batch, int64_t ranks) {
  std::string text;
  const auto propose = [&](const char* name, const std::string& values) { text += fmt::format("\n  {}: {}", name, values); };
  const auto train = *given.train;
  const auto known = given.micro.value_or(1) * given.accumulation.value_or(1) * ranks;
  propose(kTrain, given.micro && given.accumulation ? std::to_string(known) : multiples_near(train, known));
  if (train % ranks != 0) return text;
  const auto rows = train / ranks;
  if (given.micro) {
    propose(kMicro, !given.accumulation               ? divisors_near(rows, *given.micro)
                    : rows % *given.accumulation == 0 ? std::to_string(rows / *given.accumulation)
                                                      : "none with this accumulation");
  }
  if (given.accumulation) {
    propose(kSteps, !given.micro               ? divisors_near(rows, *given.accumulation)
                    : rows % *given.micro == 0 ? std::to_string(rows / *given.micro)
                                               : "none with this micro-batch");
  }
  return text;
}

} // namespace

BatchConfig complete_batch(const GivenBatch& given, int64_t ranks, const std::string& source) {
  check_positive(kTrain, given.train, source);
  check_positive(kMicro, given.micro, source);
  check_positive(kSteps, given.accumulation, source);
  TORCH_CHECK_VALUE(given.train || given.micro, source, ": the batch is not given: give the argument micro_batch_size, or ",
                    kMicro, ", the rows of a forward on one rank, or ", kTrain, ", the rows of a step on all ranks");
  constexpr double kMostRows = 1e15;
  const auto rows = static_cast<double>(given.micro.value_or(1)) * static_cast<double>(given.accumulation.value_or(1)) *
                    static_cast<double>(ranks);
  TORCH_CHECK_VALUE(rows <= kMostRows && static_cast<double>(given.train.value_or(1)) <= kMostRows, source,
                    ": the batch has more rows than can be counted");
  BatchConfig batch;
  if (given.train && given.micro) {
    batch = {*given.train, *given.micro, given.accumulation.value_or(*given.train / *given.micro / ranks)};
  } else if (given.train) {
    batch.train = *given.train;
    batch.accumulation = given.accumulation.value_or(1);
    batch.micro = batch.train / ranks / batch.accumulation;
  } else {
    batch.micro = *given.micro;
    batch.accumulation = given.accumulation.value_or(1);
    batch.train = batch.micro * batch.accumulation * ranks;
  }
  const bool fits = batch.micro > 0 && batch.accumulation > 0 && batch.train == batch.micro * batch.accumulation * ranks;
  TORCH_CHECK_VALUE(fits, source, ": the batch does not divide: ", kTrain, " is ", batch.train, ", but ", kMicro, " (",
                    given.micro ? std::to_string(batch.micro) : "not given", ") × ", kSteps, " (",
                    given.accumulation ? std::to_string(batch.accumulation) : "not given", ") × ", ranks,
                    " data-parallel ranks do not make it. What fits with the other numbers:", proposals(given, batch, ranks));
  return batch;
}

} // namespace tessera::internal
