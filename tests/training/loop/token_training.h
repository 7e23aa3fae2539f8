#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include <tessera/mesh/device_mesh.h>
#include <tessera/tests/fsdp/models.h>
#include <tessera/training/trainer.h>

namespace tessera::testing {

/// Sequences of which some tokens are not predicted.
struct Tokens {
  torch::Tensor tokens;  ///< [rows, 9]
  torch::Tensor targets; ///< [rows, 8], -100 for what is not predicted

  int64_t rows() const { return tokens.size(0); }
  double counted() const { return static_cast<double>(targets.ne(-100).sum().item<int64_t>()); }
};

/// Row `index`: as many targets count as its number says, from none to all.
inline Tokens token_row(int64_t index) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(77 + index));
  const auto tokens = torch::randint(0, 61, {1, 9}, generator, torch::kLong);
  auto targets = tokens.slice(1, 1).clone();
  targets.slice(1, 0, index * 5 % 9).fill_(-100);
  return {tokens, targets};
}

inline Tokens token_rows(const std::vector<int64_t>& rows) {
  std::vector<torch::Tensor> tokens, targets;
  for (const auto row : rows) {
    const auto one = token_row(row);
    tokens.push_back(one.tokens);
    targets.push_back(one.targets);
  }
  return {torch::cat(tokens), torch::cat(targets)};
}

/// Rows in an order of (seed, epoch), dealt out to ranks; where rows run out, a rank has one that counts nothing.
class TokenSource {
 public:
  TokenSource(int64_t rows, int64_t together, int64_t rank, int64_t ranks)
      : rows_(rows), together_(together), rank_(rank), ranks_(ranks) {}

  std::optional<Tokens> next() {
    if (position_.row >= rows_) {
      position_ = {position_.epoch + 1, 0};
      return std::nullopt;
    }
    const auto order = this->order();
    std::vector<int64_t> mine;
    const auto end = std::min(rows_, position_.row + together_);
    for (auto row = position_.row + rank_; row < end; row += ranks_) mine.push_back(order[static_cast<size_t>(row)]);
    const bool has_none = mine.empty();
    auto batch = token_rows(has_none ? std::vector<int64_t>{0} : mine);
    if (has_none) batch.targets.fill_(-100);
    position_.row = end;
    return batch;
  }
  DataPosition position() const { return position_; }
  void seek(const DataPosition& position) {
    TORCH_CHECK(position.row <= rows_, "seek to row ", position.row, " of ", rows_);
    position_ = position;
  }

 private:
  std::vector<int64_t> order() const {
    std::vector<int64_t> order(static_cast<size_t>(rows_));
    std::iota(order.begin(), order.end(), int64_t{0});
    std::mt19937_64 engine(static_cast<uint64_t>(31 * position_.epoch + 5));
    std::shuffle(order.begin(), order.end(), engine);
    return order;
  }

  int64_t rows_, together_, rank_, ranks_;
  DataPosition position_;
};

inline torch::Tensor token_losses(Net& net, const Tokens& batch, at::Reduction::Reduction reduction) {
  const auto logits = net->forward(batch.tokens.slice(1, 0, -1));
  const auto scores = logits.reshape({-1, logits.size(-1)});
  return at::cross_entropy_loss(scores, batch.targets.reshape({-1}).to(scores.device()), {}, reduction);
}

inline LossSum token_loss_sum(Net& net, const Tokens& batch) {
  return {.sum = token_losses(net, batch, at::Reduction::Sum), .count = batch.counted()};
}

inline Net double_net(uint64_t seed = 0) {
  auto net = make_net(seed);
  net->to(torch::kDouble);
  return net;
}

/// What a hand-written loop in one process computes.
struct PlainStep {
  double loss = 0, norm = 0;
};

/// A step of all rows of all ranks: one batch.
inline PlainStep plain_step(Net& net, torch::optim::Optimizer& optimizer, const Tokens& all, double max_norm) {
  optimizer.zero_grad();
  const auto loss = token_losses(net, all, at::Reduction::Sum) / all.counted();
  loss.backward();
  const auto norm = torch::nn::utils::clip_grad_norm_(net->parameters(), max_norm);
  optimizer.step();
  return {loss.item<double>(), norm};
}

/// The mean loss over 17 rows, without gradients.
inline double plain_validation(Net& net) {
  const torch::NoGradGuard no_grad;
  TokenSource whole(17, 8, 0, 1);
  double sum = 0, count = 0;
  while (const auto batch = whole.next()) {
    sum += token_losses(net, *batch, at::Reduction::Sum).item<double>();
    count += batch->counted();
  }
  return sum / count;
}

/// The rows of the step's micro-batches of all ranks; fewer micro-batches at the end of an epoch.
inline Tokens rows_of_step(TokenSource& whole, int64_t micro_batches) {
  std::vector<torch::Tensor> tokens, targets;
  while (static_cast<int64_t>(tokens.size()) < micro_batches) {
    const auto batch = whole.next();
    if (!batch && !tokens.empty()) break;
    if (!batch) continue;
    tokens.push_back(batch->tokens);
    targets.push_back(batch->targets);
    if (whole.position().row == 0) break;
  }
  return {torch::cat(tokens), torch::cat(targets)};
}

} // namespace tessera::testing
