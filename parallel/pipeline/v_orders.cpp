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

/// The orders in phases. `above` ranks lie above the rank, `below` below it.
struct Phases {
  Phases(const PipelineShape& shape, int64_t rank) : writer(shape, rank), above(rank), below(shape.ranks - 1 - rank) {}

  void split(size_t half) {
    writer.input_gradients(half);
    writer.weight_gradients(half);
  }

  void fill_zero_bubble() {
    repeat(2 * below + 1, [&](int64_t) { writer.forward(0); });
    repeat(above, [&](int64_t) {
      writer.forward(1);
      writer.forward(0);
    });
    repeat(below + 1, [&](int64_t) {
      writer.forward(1);
      split(1);
    });
  }

  void run_zero_bubble(int64_t count) {
    while (writer.forwards(1) < writer.forwards(0) || writer.forwards(0) < count) {
      if (writer.forwards(0) < count) writer.forward(0);
      split(0);
      writer.forward(1);
      split(1);
    }
  }

  void drain_zero_bubble() {
    repeat(above, [&](int64_t) {
      writer.input_gradients(0);
      writer.input_gradients(1);
    });
    repeat(below + 1, [&](int64_t) { split(0); });
    for (const size_t half : {1, 0}) {
      while (writer.has_waiting(half)) writer.weight_gradients(half);
    }
  }

  void fill_dual_pipe() {
    repeat(2 * below, [&](int64_t) { writer.forward(0); });
    repeat(above + 1, [&](int64_t) {
      writer.forward(0);
      writer.forward(1);
    });
    repeat(below, [&](int64_t) {
      writer.input_gradients(1);
      writer.waiting_weight_gradients();
      writer.forward(1);
    });
  }

  void run_dual_pipe(int64_t times) {
    repeat(times, [&](int64_t i) {
      if (i == 0 && below == 0) { // apart, which makes the bubble smaller
        writer.forward(0);
        writer.backward(1);
      } else {
        writer.both(0, 1);
      }
      writer.both(1, 0);
    });
    repeat(below, [&](int64_t) {
      writer.backward(1);
      writer.both(1, 0);
    });
  }

  /// The second half of the last backwards leaves its weight gradients for the end.
  void drain_dual_pipe() {
    const auto middle = (above + 1) / 2;
    repeat(above + 1, [&](int64_t i) {
      const bool splits_first = i > middle || (i == middle && above % 2 == 1);
      splits_first ? writer.input_gradients(1) : writer.backward(1);
      i >= middle ? writer.input_gradients(0) : writer.backward(0);
    });
    repeat(below, [&](int64_t) {
      writer.waiting_weight_gradients();
      writer.input_gradients(0);
    });
    repeat(above + 1, [&](int64_t) { writer.waiting_weight_gradients(); });
  }

  Writer writer;
  int64_t above, below;
};

} // namespace

/// The order is made for as many micro-batches as fill the pipeline; those that there are not are left out.
std::vector<PipelineAction> zero_bubble_v_order(const PipelineShape& shape, int64_t rank) {
  Phases phases(shape, rank);
  phases.fill_zero_bubble();
  phases.run_zero_bubble(std::max(2 * shape.ranks - 1, shape.micro_batches));
  phases.drain_zero_bubble();
  auto actions = phases.writer.take();
  std::erase_if(actions, [&](const PipelineAction& action) { return action.micro_batch >= shape.micro_batches; });
  return actions;
}

std::vector<PipelineAction> dual_pipe_v_order(const PipelineShape& shape, int64_t rank) {
  Phases phases(shape, rank);
  phases.fill_dual_pipe();
  phases.run_dual_pipe(shape.micro_batches - 2 * shape.ranks + rank + 1);
  phases.drain_dual_pipe();
  return phases.writer.take();
}

} // namespace tessera::internal::pipeline
