// Our files, read by the safetensors package and by PyTorch's distributed checkpoint.
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/dtensor/api.h>

#include "../support/subprocess.h"
#include "shared_folder.h"

namespace tessera::checkpoint {
namespace {

using ::testing::HasSubstr;
using testing::SharedFolder;

at::Tensor counting(const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  return torch::arange(c10::multiply_integers(sizes)).remainder(dtype == at::kBool ? 2 : 120).view(sizes).to(dtype);
}

TEST(Interop, PythonReadsWhatWeWrite) {
  const int64_t n = process_context().world_size();
  const auto mesh = init_device_mesh(at::kCPU, {n});
  StateDict state;
  std::vector<std::string> arguments{TESSERA_PYTHON, TESSERA_INTEROP_SCRIPT, ""};
  const auto add = [&](const std::string& name, const char* dtype_name, at::ScalarType dtype, const std::vector<int64_t>& sizes,
                       const Placements& placements) {
    const auto full = counting(sizes, dtype);
    state.add(name, placements.empty() ? full : at::Tensor(distribute_tensor(full, mesh, placements)));
    std::string shape;
    for (const auto size : sizes) shape += (shape.empty() ? "" : ",") + std::to_string(size);
    arguments.push_back(name + ":" + dtype_name + ":" + shape);
  };
  std::vector<int64_t> elements(static_cast<size_t>(n), 0); // 7 × 9, cut within rows
  for (int64_t i = 0; i < 63; ++i) ++elements[std::min(i / 10, n - 1)];
  add("ragged.elements", "float32", at::kFloat, {7, 9}, {RaggedShard{1, elements}});
  add("ragged.cube", "bfloat16", at::kBFloat16, {7, 9, 2}, {RaggedShard{1, elements}});
  add("rows", "float64", at::kDouble, {5, 3}, {Shard{0}});
  add("columns", "int64", at::kLong, {3, 5}, {Shard{1}});
  add("replicated", "float16", at::kHalf, {4}, {Replicate{}});
  add("plain", "int32", at::kInt, {2, 2}, {});
  add("bytes", "uint8", at::kByte, {3}, {});
  add("bits", "bool", at::kBool, {5}, {});
  add("scalar", "float32", at::kFloat, {}, {});

  const SharedFolder folder;
  save(state, folder.path() / "c");
  if (process_context().rank() == 0) {
    arguments[2] = folder.path() / "c";
    const auto result = testing::run_program(arguments, {}, std::chrono::seconds(120));
    EXPECT_EQ(result.status, 0) << result.output;
    EXPECT_THAT(result.output, HasSubstr("9 tensors are the same"));
  }
}

} // namespace
} // namespace tessera::checkpoint
