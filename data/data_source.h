#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

namespace tessera {

/// How far a training is in its data: the same on every rank, and all that a resume needs.
struct DataPosition {
  int64_t epoch = 0;
  int64_t row = 0; ///< rows of this epoch that all ranks together have had

  bool operator==(const DataPosition&) const = default;
};

/// What gives a rank its batches, in one order of rows that does not depend on the number of ranks.
template <typename Source>
concept BatchSource = requires(Source source, const Source& constant, const DataPosition& position) {
  {*source.next()}; // std::optional of this rank's next micro-batch; none at the end of an epoch
  { constant.position() } -> std::same_as<DataPosition>; // after what `next` has given
  {source.seek(position)};                               // the next `next` gives what follows the position
};

/// Any source of batches of one type, as std::function holds any function.
///
/// `next()` gives this rank's next micro-batch, or none at the end of the epoch; the call after that begins the next epoch. All
/// ranks get as many batches in an epoch. `position()` counts what `next` has given, not what was read ahead. `seek` goes to a
/// position that `position()` gave, on any number of ranks, without reading what lies before.
template <typename Batch>
class DataSource {
 public:
  template <BatchSource Source>
  requires(!std::same_as<std::decay_t<Source>, DataSource>)
      DataSource(Source source) // NOLINT(google-explicit-constructor): as std::function
      : source_(std::make_unique<Held<Source>>(std::move(source))) {}

  std::optional<Batch> next() { return source_->next(); }
  DataPosition position() const { return source_->position(); }
  void seek(const DataPosition& position) { source_->seek(position); }

 private:
  struct Any {
    virtual ~Any() = default;
    virtual std::optional<Batch> next() = 0;
    virtual DataPosition position() const = 0;
    virtual void seek(const DataPosition& position) = 0;
  };
  template <typename Source>
  struct Held final : Any {
    explicit Held(Source held) : source(std::move(held)) {}
    std::optional<Batch> next() override { return source.next(); }
    DataPosition position() const override { return source.position(); }
    void seek(const DataPosition& position) override { source.seek(position); }
    Source source;
  };

  std::unique_ptr<Any> source_;
};

} // namespace tessera
