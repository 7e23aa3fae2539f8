#include <c10/util/Exception.h>
#include <tessera/checkpoint/bytes/file.h>
#include <tessera/checkpoint/save/save_session.h>
#include <tessera/checkpoint/script_file.h>
#include <tessera/checkpoint/state_dict.h>

namespace tessera::checkpoint {

namespace {

using WholeTensors = c10::IValue::HashIdentityIValueMap; // of the tensors of a script, by the tensors in its slots

/// Notes what takes the place of the tensors of `module` and of those below it.
void note_whole(const torch::jit::Module& module, const std::string& prefix, const StateDict& state, WholeTensors& whole) {
  const auto type = module.type();
  for (size_t slot = 0; slot < type->numAttributes(); ++slot) {
    const auto& value = module._ivalue()->getSlot(slot);
    const auto name = prefix + type->getAttributeName(slot);
    if (value.isModule()) {
      note_whole(value.toModule(), name + ".", state, whole);
    } else if ((type->is_parameter(slot) || type->is_buffer(slot)) && value.isTensor() && value.toTensor().defined()) {
      const auto& tensor = state.tensor(name);
      whole.emplace(value, tensor.detach().requires_grad_(value.toTensor().requires_grad()));
    }
  }
}

/// A copy of `script` with the tensors of `state`, wherever it refers to its own: in lists too, as a GRU does.
torch::jit::Module with_tensors_of(const StateDict& state, const torch::jit::Module& script) {
  WholeTensors whole;
  note_whole(script, "", state, whole);
  return torch::jit::Module(script._ivalue()->deepcopy(whole, c10::Device(c10::kCPU)));
}

} // namespace

void save_script(const ScriptModule& model, const std::filesystem::path& file, const ScriptFileOptions& options) {
  TORCH_CHECK_VALUE(model, "save_script: the module is null");
  const internal::Ranks ranks;
  const SaveOptions save{.overwrite = options.overwrite};
  internal::SaveSession session(ranks, file, save, /*prepare=*/nullptr, {internal::Staged::kFile});
  StateDict state;
  session.all("gather the parameters for", [&] {
    state =
        state_dict(*model, {.full_state_dict = true, .cpu_offload = true, .rank0_only = true, .allow_unsharded_params = true});
  });
  session.commit([&] {
    with_tensors_of(state, model->script()).save(session.file().string(), options.extra_files);
    internal::File::open_to_write(session.file()).sync_and_close();
  });
}

} // namespace tessera::checkpoint
