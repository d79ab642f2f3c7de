// Runs what `torchrelay export` made, without Python: infer MODEL EXAMPLE [cuda]
//
// MODEL: an AOTInductor package (.pt2) or a TorchScript file (.torchscript.pt). EXAMPLE: the example.pt beside it,
// {"inputs": [...], "outputs": [...]}. Prints how far the outputs are from those that eager gave there, relative to
// their magnitude, and what a run takes. Exit status: 0 if they agree, 1 if not, 2 for wrong use.

#include <ATen/Parallel.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>
#include <torch/serialize.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using Tensors = std::vector<at::Tensor>;
using Model = std::function<Tensors(const Tensors&)>;

constexpr int kRuns = 20;

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Outputs of any nesting, in order.
void flatten(const c10::IValue& value, Tensors& into) {
  if (value.isTensor()) {
    into.push_back(value.toTensor());
  } else if (value.isTuple()) {
    for (const auto& one : value.toTupleRef().elements()) flatten(one, into);
  } else if (value.isList()) {
    for (const c10::IValue& one : value.toListRef()) flatten(one, into);
  }
}

Model load_package(const std::string& file) {
  auto loader = std::make_shared<torch::inductor::AOTIModelPackageLoader>(file);
  return [loader](const Tensors& inputs) { return loader->run(inputs); };
}

Model load_torchscript(const std::string& file, at::Device device) {
  auto module = std::make_shared<torch::jit::Module>(torch::jit::load(file, device));
  module->eval();
  return [module](const Tensors& inputs) {
    Tensors outputs;
    flatten(module->forward({inputs.begin(), inputs.end()}), outputs);
    return outputs;
  };
}

Tensors named(const c10::IValue& example, const std::string& name, at::Device device) {
  Tensors found;
  flatten(example.toGenericDict().at(name), found);
  for (auto& tensor : found) tensor = tensor.to(device);
  return found;
}

double difference(const at::Tensor& want, const at::Tensor& have) {
  if (want.sizes() != have.sizes() || want.scalar_type() != have.scalar_type()) {
    throw std::runtime_error("an output has another shape or type than eager's");
  }
  if (want.numel() == 0) return 0.0;
  const auto a = want.to(at::kDouble), b = have.to(at::kDouble);
  const double magnitude = a.abs().max().item<double>();
  return (a - b).abs().max().item<double>() / std::max(magnitude, 1e-3);
}

int run(const std::string& file, const std::string& example_file, at::Device device) {
  std::ifstream opened(example_file, std::ios::binary);
  if (!opened) throw std::runtime_error("cannot read " + example_file);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(opened)), std::istreambuf_iterator<char>());
  const c10::IValue example = torch::pickle_load(bytes);
  const Tensors inputs = named(example, "inputs", device), wanted = named(example, "outputs", device);

  c10::InferenceMode without_gradients;
  const Model model = ends_with(file, ".pt2") ? load_package(file) : load_torchscript(file, device);
  const Tensors outputs = model(inputs);
  if (outputs.size() != wanted.size()) throw std::runtime_error("eager had another number of outputs");
  double worst = 0.0;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const double found = difference(wanted[i], outputs[i]);
    if (!(found <= worst)) worst = found;  // so written, a NaN is the worst of all
  }

  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kRuns; ++i) model(inputs).front().sum().item();  // item: a GPU's run has ended then
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
  const bool half = outputs.front().scalar_type() == at::kHalf || outputs.front().scalar_type() == at::kBFloat16;
  const bool agrees = worst <= (half ? 6e-2 : 5e-3);
  std::printf("%zu outputs, difference %.3g: %s; %.3f ms a run, %d threads\n", outputs.size(), worst,
              agrees ? "agrees with eager" : "DIFFERS FROM EAGER", took.count() / kRuns, at::get_num_threads());
  return agrees ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3 || count > 4 || (count == 4 && std::string(arguments[3]) != "cuda")) {
    std::fprintf(stderr, "usage: infer MODEL EXAMPLE [cuda]\n");
    return 2;
  }
  try {
    return run(arguments[1], arguments[2], count == 4 ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU));
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "infer: %s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "infer: %s\n", error.what());
    return 1;
  }
}
