#pragma once

// Internal: the parameters of a group whose gather is extended by the program.

#include <ATen/core/Tensor.h>

#include <any>
#include <functional>
#include <istream>
#include <memory>
#include <string>
#include <vector>

#include <tessera/fsdp/gather_extension.h>

namespace tessera::internal {

/// What each rank sends of such parameters: one region of bytes, of the same size on all ranks, behind what it sends of the
/// others.
class ExtendedGather {
 public:
  bool is_empty() const { return extended_.empty(); }
  int64_t bytes() const { return bytes_; } ///< of a region; 0 before the first `prepare`
  void add(size_t index, std::shared_ptr<GatherExtension> extension) { extended_.push_back({index, std::move(extension)}); }
  bool contains(size_t index) const { return extension_of(index) != nullptr; }
  /// Null for a parameter without one.
  std::shared_ptr<GatherExtension> extension_of(size_t index) const;

  /// Asks the extensions what this rank sends; the first time the ranks tell each other the shapes. `local` and `name` are of a
  /// parameter by its index.
  void prepare(const DeviceMesh& mesh, Communicator* communicator, const std::string& label,
               const std::function<at::Tensor(size_t)>& local, const std::function<std::string(size_t)>& name);
  /// Writes what `prepare` got to this rank's region.
  void write(const at::Tensor& region);
  /// Makes the parameters of the regions of all ranks, [ranks, bytes].
  void read(const at::Tensor& regions, const std::function<at::Tensor(size_t)>& whole,
            const std::function<std::string(size_t)>& name) const;

 private:
  struct Shape {
    at::ScalarType dtype;
    std::vector<int64_t> sizes;
    bool operator==(const Shape&) const = default;
  };
  struct Extended {
    size_t index;
    std::shared_ptr<GatherExtension> extension;
    GatherExtension::Sent sent = {};
    std::vector<std::vector<Shape>> shapes = {}; ///< by rank
  };
  static std::vector<Shape> shapes_of(const GatherExtension::Sent& sent);
  /// Writes shapes as text, a line a parameter; `decode` reads them back.
  static std::string encode(const std::vector<std::vector<Shape>>& shapes);
  static std::vector<Shape> decode(std::istream& numbers);
  void exchange_shapes(const std::vector<std::vector<Shape>>& mine, const DeviceMesh& mesh, Communicator* communicator,
                       const std::string& label, const std::function<std::string(size_t)>& name);
  /// Where the tensors of rank `rank` lie in its region, one after another; returns its end.
  template <typename Visit> // void(Extended&, size_t tensor, int64_t offset, const Shape&)
  int64_t visit(size_t rank, const Visit& visit) const;

  std::vector<Extended> extended_;
  size_t rank_ = 0;
  int64_t bytes_ = 0;
};

} // namespace tessera::internal
