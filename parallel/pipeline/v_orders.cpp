// The two kinds whose stages go down the ranks and up again: a rank has one stage of each half, rank 0 the first and the last.
#include <tessera/parallel/pipeline/schedule_shapes.h>

#include <algorithm>
#include <array>
#include <deque>

namespace tessera::internal::pipeline {

namespace {

using Work = PipelineWork;

/// Appends actions of a rank's two stages, each for its next micro-batch.
class Writer {
 public:
  Writer(const PipelineShape& shape, int64_t rank) : stages_{rank, 2 * shape.ranks - 1 - rank} {}

  void forward(size_t half, bool overlaps_next = false) { add(Work::kForward, half, forwards_[half]++, overlaps_next); }
  void backward(size_t half) {
    add(Work::kBackward, half, backwards_[half]++);
    ++weights_[half];
  }
  /// Its weight gradients wait.
  void input_gradients(size_t half) {
    waiting_.push_back(half);
    add(Work::kInputGradients, half, backwards_[half]++);
  }
  void weight_gradients(size_t half) {
    waiting_.erase(std::find(waiting_.begin(), waiting_.end(), half));
    add(Work::kWeightGradients, half, weights_[half]++);
  }
  /// Takes those that have waited longest, if any.
  void waiting_weight_gradients() {
    if (!waiting_.empty()) weight_gradients(waiting_.front());
  }
  /// A forward of one stage beside a backward of the other.
  void both(size_t forward_half, size_t backward_half) {
    forward(forward_half, /*overlaps_next=*/true);
    backward(backward_half);
  }

  int64_t forwards(size_t half) const { return forwards_[half]; }
  bool has_waiting(size_t half) const { return weights_[half] < backwards_[half]; }
  std::vector<PipelineAction> take() { return std::move(actions_); }

 private:
  void add(Work work, size_t half, int64_t micro_batch, bool overlaps_next = false) {
    actions_.push_back({work, stages_[half], micro_batch, overlaps_next});
  }

  std::array<int64_t, 2> stages_;
  std::array<int64_t, 2> forwards_{}, backwards_{}, weights_{};
  std::deque<size_t> waiting_; ///< stages, in the order of their input gradients
  std::vector<PipelineAction> actions_;
};

template <typename Act>
void repeat(int64_t times, const Act& act) {
  for (int64_t i = 0; i < times; ++i) act(i);
}

} // namespace

/// The order is made for as many micro-batches as fill the pipeline; those that there are not are left out.
std::vector<PipelineAction> zero_bubble_v_order(const PipelineShape& shape, int64_t rank) {
  const auto ranks = shape.ranks, count = std::max(2 * ranks - 1, shape.micro_batches);
  Writer writer(shape, rank);
  const auto split = [&](size_t half) {
    writer.input_gradients(half);
    writer.weight_gradients(half);
  };
  repeat(2 * (ranks - rank) - 1, [&](int64_t) { writer.forward(0); });
  repeat(rank, [&](int64_t) {
    writer.forward(1);
    writer.forward(0);
  });
  repeat(ranks - rank, [&](int64_t) {
    writer.forward(1);
    split(1);
  });
  while (writer.forwards(1) < writer.forwards(0) || writer.forwards(0) < count) {
    if (writer.forwards(0) < count) writer.forward(0);
    split(0);
    writer.forward(1);
    split(1);
  }
  repeat(rank, [&](int64_t) {
    writer.input_gradients(0);
    writer.input_gradients(1);
  });
  repeat(ranks - rank, [&](int64_t) { split(0); });
  for (const size_t half : {1, 0}) {
    while (writer.has_waiting(half)) writer.weight_gradients(half);
  }
  auto actions = writer.take();
  std::erase_if(actions, [&](const PipelineAction& action) { return action.micro_batch >= shape.micro_batches; });
  return actions;
}

std::vector<PipelineAction> dual_pipe_v_order(const PipelineShape& shape, int64_t rank) {
  const auto ranks = shape.ranks, after_it = ranks - 1 - rank, upto_it = rank + 1;
  Writer writer(shape, rank);
  repeat(2 * after_it, [&](int64_t) { writer.forward(0); });
  repeat(upto_it, [&](int64_t) {
    writer.forward(0);
    writer.forward(1);
  });
  repeat(after_it, [&](int64_t) {
    writer.input_gradients(1);
    writer.waiting_weight_gradients();
    writer.forward(1);
  });
  repeat(shape.micro_batches - 2 * ranks + upto_it, [&](int64_t i) {
    if (i == 0 && rank == ranks - 1) { // apart, which makes the bubble smaller
      writer.forward(0);
      writer.backward(1);
    } else {
      writer.both(0, 1);
    }
    writer.both(1, 0);
  });
  repeat(after_it, [&](int64_t) {
    writer.backward(1);
    writer.both(1, 0);
  });
  repeat(upto_it, [&](int64_t i) { // the second half of these backwards leaves its weight gradients for the end
    const auto middle = upto_it / 2;
    const bool splits_first = i > middle || (i == middle && rank % 2 == 1);
    splits_first ? writer.input_gradients(1) : writer.backward(1);
    i >= middle ? writer.input_gradients(0) : writer.backward(0);
  });
  repeat(after_it, [&](int64_t) {
    writer.waiting_weight_gradients();
    writer.input_gradients(0);
  });
  repeat(upto_it, [&](int64_t) { writer.waiting_weight_gradients(); });
  return writer.take();
}

} // namespace tessera::internal::pipeline
