#pragma once

#include <tessera/tests/fsdp/scripts/side.h>

namespace tessera::testing::scripts {

/// One forward of the trainee over this side's part of a random batch, with a random order of blocks and a random loss. Without
/// grad mode the loss leaves out terms that are of parameters alone.
/// Where `may_recompute`, the sharded side may run the blocks once more in backward, which follows at once.
Tensor random_loss(Turn& turn, const Tap& tap = {}, bool may_recompute = false, bool may_mix_dtensors = true);

/// The ranks' mean of their losses, each after a forward with an order of blocks of its own. For a replica.
Tensor loss_of_ranks_apart(Turn& turn);

/// The batches of one rank: rows of what the model takes.
struct RankBatch {
  Tensor x, ids;
};

/// The losses of one round of uneven batches, one a batch, after one forward through every block of all rows together. One
/// without rows is NaN.
std::vector<Tensor> losses_of(RandomModel& model, const std::vector<RankBatch>& batches);

/// The mean of the outputs' squares, or of what is below 1 whatever they are.
enum class Squares { kAsTheyAre, kBounded };

/// A forward through every block, for gradients of all parameters.
Tensor whole_loss(const Side& side, Trainee& trainee, uint64_t seed, Squares squares = Squares::kAsTheyAre);

/// `loss.backward()`, where the loss requires a gradient: with everything frozen it does not.
void backward(const Tensor& loss, bool retain_graph = false, const std::vector<Tensor>& inputs = {});

/// Whether backwards of the trainee reduce at their end, or go on with their reductions beside what comes next.
void set_is_last_backward(Turn& turn, bool is_last);

/// Runs `train`, after an error of which the gradients of `model` are given up, also those that wait for their reduction.
void train_or_give_up(torch::nn::Module& model, const std::function<void()>& train);

} // namespace tessera::testing::scripts
