// A certified OpenID provider (node-oidc-provider) on loopback: node openid_provider.mjs FOLDER SETTINGS
// FOLDER has its node_modules. SETTINGS, JSON: port; groups by login; seconds that an access token holds.
// It takes any login with any password. Access tokens are JWTs for the audience `torchrelay`, with groups and name.
import { generateKeyPairSync } from 'node:crypto';

const [folder, settings] = process.argv.slice(2);
const { default: Provider } = await import(`${folder}/node_modules/oidc-provider/lib/index.js`);
const { port, groups, seconds } = JSON.parse(settings);
const about = (login) => ({ groups: groups[login] ?? [], preferred_username: login });
const { privateKey } = generateKeyPairSync('rsa', { modulusLength: 2048 });
const key = { ...privateKey.export({ format: 'jwk' }), kid: 'first', use: 'sig', alg: 'RS256' };

const provider = new Provider(`http://127.0.0.1:${port}`, {
  clients: [{
    client_id: 'torchrelay-cli',
    token_endpoint_auth_method: 'none',
    grant_types: ['urn:ietf:params:oauth:grant-type:device_code', 'refresh_token', 'authorization_code'],
    redirect_uris: ['http://127.0.0.1/sign-in/callback'],
    application_type: 'native',
    response_types: ['code'],
  }],
  jwks: { keys: [key] },
  cookies: { keys: ['only of tests'] },
  scopes: ['openid', 'offline_access', 'groups'],
  claims: { openid: ['sub'], groups: ['groups', 'preferred_username'] },
  conformIdTokenClaims: false,
  findAccount: (ctx, id) => ({ accountId: id, claims: () => ({ sub: id, ...about(id) }) }),
  extraTokenClaims: (ctx, token) => about(token.accountId),
  rotateRefreshToken: true,
  ttl: { IdToken: 5 * seconds },
  features: {
    deviceFlow: { enabled: true },
    revocation: { enabled: true },
    resourceIndicators: {
      enabled: true,
      defaultResource: () => 'urn:torchrelay',
      useGrantedResource: () => true,
      getResourceServerInfo: () => ({
        scope: '',
        audience: 'torchrelay',
        accessTokenFormat: 'jwt',
        accessTokenTTL: seconds,
        jwt: { sign: { alg: 'RS256' } },
      }),
    },
  },
});
provider.listen(port, '127.0.0.1', () => console.log('ready'));
